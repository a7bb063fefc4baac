"""Write the files anew into a folder."""

import sys
from pathlib import Path

from tests.files.kept import write

write(Path(sys.argv[1]))

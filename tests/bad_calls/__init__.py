"""Calls of every public function, constructor and method with one wrong argument, sorted by what comes of them."""

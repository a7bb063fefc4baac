"""Rules of combining against loops in NumPy and another library, and attacks."""

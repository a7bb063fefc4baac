"""A federation of related tasks, to be run by Flower."""

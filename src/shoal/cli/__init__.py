"""Defines the command line; ``app`` registers the commands of the other modules."""

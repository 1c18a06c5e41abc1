"""Thin typed wrappers of kernel interfaces, one module each. They know nothing about Services."""

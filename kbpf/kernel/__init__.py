"""Thin typed faces of kernel subsystems, one module each. They know nothing of Services."""

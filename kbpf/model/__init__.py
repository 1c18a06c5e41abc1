"""Values that the packages exchange: frozen, comparable, without I/O."""

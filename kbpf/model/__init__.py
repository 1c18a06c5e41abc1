"""Values that pass between the rooms: frozen, comparable, without I/O."""

"""A command line becomes settings: search path, composition, the core's keys, stacking."""

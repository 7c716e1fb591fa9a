"""Calling a plugin: a guard around every implementation of a hook, and what each hook expects."""

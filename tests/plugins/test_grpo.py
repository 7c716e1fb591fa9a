"""GRPO's numbers: fixture F1 of the method sheet (section 6), and the edge cases of groups."""

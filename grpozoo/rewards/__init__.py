"""Asking reward plugins, and what several of them share."""

"""A run as a thing: assembly, what hooks ask of it, processes, state, tracking."""


def __getattr__(name):
    if name == "Run":  # on demand: the folder's lighter rooms import without torch
        from grpozoo.run.run import Run

        return Run
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

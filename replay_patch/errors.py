"""Every error this package raises on purpose. Each is also the built-in error a caller would expect
in its place, so `except ValueError` around code for Megatron's own replay keeps working."""


class ReplayPatchError(Exception):
    """Base of all errors of replay-patch."""


class PatchNotActive(ReplayPatchError, RuntimeError):
    """Replay was asked for, and a patch that it needs is not in place."""


class RouteError(ReplayPatchError, ValueError):
    """Expert ids, or the router they are for, do not allow a right replay."""


class LayoutError(ReplayPatchError, ValueError):
    """Tokens, routes and the parallel layout do not fit each other."""


class WireError(ReplayPatchError, ValueError):
    """Bytes or a message that do not decode to routes."""


class SettingsError(ReplayPatchError, ValueError):
    """A setting (environment variable or config value) that is not understood."""

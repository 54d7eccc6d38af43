"""The roots of every error that qwenrt raises on purpose, and of its warnings."""


class QwenrtError(ValueError):
    """An error whose message names the thing, its value and the remedy; shown to users in one line, without a traceback."""


class ConfigError(QwenrtError):
    """Something is wrong with what was set up: a checkpoint, an engine folder, an option, the machine."""


class RequestError(QwenrtError):
    """Something is wrong with one request; every other request goes on."""


class DeviceError(QwenrtError):
    """A GPU, or the library that drives it, failed while it worked; what it held is lost and the engine must be loaded again."""


class QwenrtWarning(UserWarning):
    """What was asked for is done, and may not be what was wanted; one line that names the value and the consequence."""

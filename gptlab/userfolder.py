"""Where a user's own things are kept: prepared texts, measured rates, compiled kernels, downloads.

    >>> from gptlab.userfolder import cache_folder
    >>> cache_folder().name
    'gptlab'

Left out on purpose: what is kept there.
"""

from __future__ import annotations

from pathlib import Path

from gptlab.fields import ConfigError


def cache_folder() -> Path:
    """The user's cache, XDG_CACHE_HOME where that is set.

    Raises:
        ConfigError: the user has no home. The folder for temporary files is no substitute: others may write there,
            and compiled code is loaded from here.
    """
    import platformdirs

    try:
        folder = platformdirs.user_cache_path("gptlab")
    except RuntimeError:  # ~ stands for nothing
        folder = Path("~")
    if not folder.is_absolute():  # older versions of platformdirs hand the ~ on, which would become a folder
        raise ConfigError(
            "There is no home folder to keep prepared texts in: set XDG_CACHE_HOME to the full path of a folder that "
            "can be written."
        )
    return folder

"""The process-wide switch for automatic padding. Owns nothing else."""

from __future__ import annotations

import os

from dask_controller.errors import UnsupportedTypeError
from dask_controller.protocol.meta import AUTO_PADDING_KEY

__all__ = ["DataProtoConfig"]


class _DataProtoConfigMeta(type):
    """Makes ``auto_padding`` a property of the class itself, as verl's programs expect."""

    _auto_padding = False

    @property
    def auto_padding(cls) -> bool:
        """Whether every batch is padded; the environment variable is read each time, so that ranks may set it."""
        return os.environ.get("VERL_AUTO_PADDING", "").upper() in ("TRUE", "1") or cls._auto_padding

    @auto_padding.setter
    def auto_padding(cls, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise UnsupportedTypeError(
                f"DataProtoConfig.auto_padding must be True or False, got {enabled!r} of type {type(enabled).__name__}."
            )
        cls._auto_padding = enabled


class DataProtoConfig(metaclass=_DataProtoConfigMeta):
    """Settings of all batches of this process.

    ``DataProtoConfig.auto_padding = True``, or ``VERL_AUTO_PADDING=1`` in the environment, lets dispatch pad every
    batch that does not divide evenly. One batch alone: ``DataProto.from_dict(..., auto_padding=True)``.
    """

    auto_padding_key = AUTO_PADDING_KEY

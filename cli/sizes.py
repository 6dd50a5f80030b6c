"""Options that are sizes in bytes. Knows the command's errors; units are the engine's to read."""

from engine.errors import InvalidParameter
from engine.sizes import bytes_of
from fabric.errors import InvalidArgument


def size_of(text: str, option: str, least: int = 1, bare: int = 1) -> int:
    """Bytes of a size such as 80GB, 141GiB or 24G; a number alone counts `bare` bytes.

    Raises InvalidArgument, naming the option, for what is none or is below `least` bytes.
    """
    try:
        return bytes_of(text, option, least, bare)
    except InvalidParameter as error:
        raise InvalidArgument(error.message, field=option, fix=error.fix) from error

"""Objects that stand for another one and change a single thing about it."""

from typing import Any
from weakref import WeakKeyDictionary

__all__ = ["Forwarder", "ForwardsReads", "note_original", "original_of"]


class ForwardsReads:
    """Attributes that this object does not have are those of the object it stands for, ``forwards_to``."""

    forwards_to: Any

    def __getattr__(self, name: str) -> Any:
        if name == "forwards_to" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)  # not set yet (copying, unpickling), or a protocol that it does not have
        return getattr(self.forwards_to, name)


class Forwarder(ForwardsReads):
    """Forwards writes as well, and answers ``isinstance`` as the other object does.

    So code that asks for a ``DistributedSampler`` or for the user's own dataset class still finds one.

    Args:
        forwards_to: the other object.
        own: the attributes that are this object's.
    """

    def __init__(self, forwards_to: Any, **own: Any) -> None:
        vars(self).update(forwards_to=forwards_to, **own)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Any]:
        return type(self.forwards_to)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self.forwards_to, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (type(self), vars(self).copy())


def _revive(cls: type[Forwarder], attributes: dict[str, Any]) -> Forwarder:
    forwarder = cls.__new__(cls)
    vars(forwarder).update(attributes)
    return forwarder


_originals: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def note_original(item: object, original: object) -> None:
    """Remembers, for as long as ``item`` lives, from which object it was made."""
    if item is not original:
        try:
            _originals[item] = original
        except TypeError:  # it has no hash, or no weak references
            return


def original_of(item: object) -> object:
    """Returns the object that an item was made from, or the item itself."""
    try:
        return _originals.get(item, item)
    except TypeError:
        return item

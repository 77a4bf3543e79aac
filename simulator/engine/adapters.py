"""LoRA adapters on the device: slots that are filled on demand, least recently used out first."""

from collections import OrderedDict


class AdapterSlots:
    """The adapters that are loaded, and the number of running requests that use each."""

    def __init__(self, slots: float, load_s: float) -> None:
        self._slots = slots
        self._load_s = load_s
        self._users: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self.loads = 0

    def admits(self, adapter: str) -> bool:
        """Return True if its adapter is loaded, or a slot is empty or idle."""
        return adapter in self._users or len(self._users) < self._slots

    def acquire(self, adapter: str) -> float:
        """Use an adapter; return the time to load it, in s."""
        resident = adapter in self._users or adapter in self._idle
        self._idle.pop(adapter, None)
        self._users[adapter] = self._users.get(adapter, 0) + 1
        if resident:
            return 0.0
        if len(self._users) + len(self._idle) > self._slots:
            self._idle.popitem(last=False)
        self.loads += 1
        return self._load_s

    def release(self, adapter: str) -> None:
        self._users[adapter] -= 1
        if not self._users[adapter]:
            del self._users[adapter]
            self._idle[adapter] = None

"""What a compiled kernel is found to do wrong."""


class Fault(Exception):
    """An access out of bounds, a wait that would hang, a missing fence, or what is not known here."""


class Race(Fault):
    """Two accesses to shared memory that nothing orders."""

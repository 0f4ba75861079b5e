from __future__ import annotations

CompiledProgram = int


def compiled_programs(*a):
    return ()


def programs_table(*a):
    return []

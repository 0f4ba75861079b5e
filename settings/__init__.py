"""Settings: schema, layered loading with provenance, aliases, secrets and presets."""

from settings.errors import InputError
from settings.loading.resolve import Resolved, load
from settings.schema.settings import Settings

__all__ = ["InputError", "Resolved", "Settings", "load"]

"""The model card of an exported policy: what it is, how it was trained, what that changed, how to load it.

A card is made to be uploaded, so settings of a single machine stay out of it, and of local paths only the last name
is told.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from app.checkpoint.policy_checkpoint import PolicyCheckpoint
from app.model.io.model_files import BUILTIN_PREFIX
from app.model.quantization import QUANTIZE_BASE_SETTING
from app.records.run_directory import RunDirectory
from app.report.before_after import before_and_after
from app.report.run_files import RunFiles
from app.runtime.model_spec import ModelSpec
from app.tracking.run_log import WANDB_SECTIONS
from settings import InputError, Resolved
from settings.loading.printing import from_yaml
from settings.loading.secrets import redact

CARD_FILE = "README.md"

HUB_DATA_PREFIX = "hf:"

KEY_SETTINGS = (
    "model.path", "model.revision", "model.dtype", "data.source", "data.system_prompt", "reward.functions",
    "algorithm.name", "algorithm.beta", "optimizer.learning_rate", "rollout.prompts_per_step", "rollout.group_size",
    "rollout.max_new_tokens", "rollout.temperature", "run.steps", "run.seed",
)  # fmt: skip
"""Told whether anybody set them or not."""

LORA_RANK_SETTING = "model.lora.rank"

ADAPTER_SETTINGS = (LORA_RANK_SETTING, "model.lora.alpha", "model.lora.targets", QUANTIZE_BASE_SETTING)
"""Told of a run with adapters, and of no other."""

PATH_SETTINGS = ("model.path", "data.source", "data.eval_source")
"""What is neither built in nor of the hub is a path here, however it begins."""

PRIVATE_SETTINGS = ("run.dir", "run.name")
"""In sections that are uploaded, and still those of one machine, or told elsewhere."""

USAGE_TEMPLATE = """\
```python
{imports}

path = "path/of/this/folder"
tokenizer = AutoTokenizer.from_pretrained(path)
model = {loads}.from_pretrained(path)
messages = {messages}
ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
answer = model.generate(**ids, max_new_tokens={max_new_tokens})[0, ids["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
```"""


@dataclass(frozen=True)
class ExportFormat:
    """In which a policy is written."""

    weights_description: str
    """What its weights are."""
    library: str = "transformers"
    base_model_relation: str = "finetune"
    """To its base, in a hub's words."""
    imports: str = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    model_class: str = "AutoModelForCausalLM"


FULL_MODEL = ExportFormat("The weights are those of the checkpoint")
MERGED_MODEL = ExportFormat("The weights are the base's, with the adapters of the checkpoint merged into them")
ADAPTER = ExportFormat(
    "The weights are the adapters of the checkpoint alone",
    library="peft",
    base_model_relation="adapter",
    imports="from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer",
    model_class="AutoPeftModelForCausalLM",
)


def export_notes(export_format: ExportFormat, *, dtype: str, quantization: str | None) -> Iterator[str]:
    """For people, wherein what is written is not what the run measured.

    Args:
        quantization: of what adapters learned beside.
    """
    if export_format is MERGED_MODEL and dtype != "float32":
        yield (
            f"merged in {dtype}, small changes of a weight are rounded away, and with them maybe most of what the "
            "adapters learned; `grpo export --dtype float32` keeps it, and so does `--adapter`"
        )
    if quantization is not None:
        yield (
            f"the adapters were trained beside the base's kernels in {quantization} ({QUANTIZE_BASE_SETTING}); beside "
            f"the base "
            "itself they make another model than the one that the run measured"
        )


def model_card(
    resolved: Resolved, saved_policy: PolicyCheckpoint, model: ModelSpec, *, export_format: ExportFormat, dtype: str
) -> str:
    """The README.md of an export of this checkpoint, without figures where the run's cannot be read."""
    files = _read_run_files(saved_policy.run)
    settings = {name: value for name, (value, _) in from_yaml(resolved.to_yaml().encode(), name="settings").items()}
    if files is not None:
        settings |= {name: value for name, (value, _) in files.settings.items()}
    # Those of the model that was opened: --set may have named another place of it than the run had it from.
    settings |= {"model.path": resolved.settings.model.path, "model.revision": model.files.commit}
    hub_id = settings["model.path"] if model.files.commit is not None else None
    settings |= {
        name: _last_path_part(settings[name]) for name in PATH_SETTINGS if name != "model.path" or hub_id is None
    }
    base = hub_id or model.files.name
    name = base.rpartition("/")[2].removeprefix("builtin:")
    parts = [
        front_matter(export_format, hub_id, str(settings["data.source"])),
        f"# {name} after {saved_policy.step} steps of {settings['algorithm.name']}",
        _origin_paragraph(saved_policy, settings, export_format, base=base, dtype=dtype),
    ]
    if files is not None:
        parts += ["## Before and after", *_before_after_section(files, settings, step=saved_policy.step)]
    parts += ["## Training", _settings_table(settings, files), "## Use", _usage_section(export_format, settings)]
    return redact("\n\n".join(parts) + "\n")


def _read_run_files(run: RunDirectory) -> RunFiles | None:
    """What the run left behind; None where the checkpoint was carried away from it, or it cannot be read."""
    if not (run.settings_path.is_file() and run.metrics_path.is_file()):
        return None
    try:
        return RunFiles.read(run.path)
    except InputError as error:
        print(f"note: the model card tells no figures of the run: {error}", file=sys.stderr)
        return None


def front_matter(export_format: ExportFormat, hub_id: str | None, source: str) -> str:
    """What a hub reads of a card: YAML between two lines.

    Args:
        form: in which it is written.
        hub_id: of the base; None where it is not from the hub, which takes nothing else for a base.
        source: `data.source`.
    """
    fields: dict[str, Any] = {"library_name": export_format.library, "pipeline_tag": "text-generation"}
    if hub_id is not None:
        fields |= {"base_model": hub_id, "base_model_relation": export_format.base_model_relation}
    if source.startswith(HUB_DATA_PREFIX):
        fields["datasets"] = [source.removeprefix(HUB_DATA_PREFIX).partition(":")[0]]
    fields["tags"] = ["grpo", "reinforcement-learning"]
    return f"---\n{yaml.safe_dump(fields, sort_keys=False)}---"


def _origin_paragraph(
    saved_policy: PolicyCheckpoint, settings: Mapping[str, Any], export_format: ExportFormat, *, base: str, dtype: str
) -> str:
    weights = (
        f"{export_format.weights_description}, {'in float32' if dtype == 'float32' else f'rounded once to {dtype}'}."
    )
    quantization = settings.get(QUANTIZE_BASE_SETTING) if settings.get(LORA_RANK_SETTING) else None
    weights += "".join(
        f" Note: {note}." for note in export_notes(export_format, dtype=dtype, quantization=quantization)
    )
    return (
        f"`{base}`, trained with the algorithm `{settings['algorithm.name']}` on `{settings['data.source']}`: "
        f"step {saved_policy.step} of the run `{settings['run.name']}`, written by `grpo export`. {weights}"
    )


def _before_after_section(files: RunFiles, settings: Mapping[str, Any], *, step: int) -> list[str]:
    """What the run measured up to the step."""
    found = before_and_after([record for record in files.history if record["step"] <= step])
    header = found.header or ("", "first", "last")
    lines = [_table(header, found.rows)] if found.rows else ["Nothing was measured up to this step."]
    if found.header:
        most, num_samples = settings["eval.num_prompts"], settings.get("eval.num_samples", 1)
        prompts = "All held-out prompts" if most is None else f"{most} held-out prompts at most"
        lines.append(
            f"{prompts} of `{settings['data.eval_source'] or settings['data.source']}`, "
            f"{'one answer' if num_samples == 1 else f'{num_samples} answers'} each at temperature "
            f"{settings['eval.temperature']}."
        )
    return lines


def _settings_table(settings: Mapping[str, Any], files: RunFiles | None) -> str:
    """The key settings, and all that somebody has set to something else than the default."""
    chosen = {one.name for one in files.non_default_settings() if one.origin != "derived"} if files else set()
    told = {*KEY_SETTINGS, *(name for name in chosen if name not in ADAPTER_SETTINGS)}
    if settings.get(LORA_RANK_SETTING):
        told |= {*ADAPTER_SETTINGS}
    public = (name for name in settings if name.partition(".")[0] in WANDB_SECTIONS and name not in PRIVATE_SETTINGS)
    values = {name: _without_directories(settings[name]) for name in public if name in told}
    rows = [(f"`{name}`", f"`{json.dumps(value, ensure_ascii=False)}`") for name, value in values.items()]
    return _table(("setting", "value"), rows)


def _usage_section(export_format: ExportFormat, settings: Mapping[str, Any]) -> str:
    system = settings["data.system_prompt"]
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "..."})
    longest = settings["rollout.max_new_tokens"]
    return USAGE_TEMPLATE.format(
        imports=export_format.imports, loads=export_format.model_class, messages=messages, max_new_tokens=longest
    )


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _without_directories(value: Any) -> Any:
    """The same, of a local path its last name alone."""
    if isinstance(value, Mapping):
        return {name: _without_directories(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_directories(item) for item in value]
    is_local = isinstance(value, str) and value.startswith(("/", "~", "./", "../"))
    return _last_path_part(value) if is_local else value


def _last_path_part(source: Any) -> Any:
    """Of a path; what is built in or of the hub, or nothing at all, stays as it is."""
    if not isinstance(source, str) or source.startswith((HUB_DATA_PREFIX, BUILTIN_PREFIX)):
        return source
    return source.rstrip("/").rpartition("/")[2]

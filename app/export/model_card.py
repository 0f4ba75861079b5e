"""The model card of an exported policy: its origin, its training, its evaluations and how to load it.

Cards are meant to be uploaded, so machine-specific settings are omitted and local paths are shortened to the last part.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from app.checkpoint.saved_policy import PolicyCheckpoint
from app.model.quantization import QUANTIZE_BASE_SETTING
from app.prompts.dataset import split_hub_source
from app.records.run_directory import RunDirectory
from app.records.text_format import format_count
from app.report.before_after import before_and_after, best_evaluation
from app.report.run_files import RunFiles
from app.runtime.model_spec import ModelSpec
from app.tracking.run_log import WANDB_SECTIONS
from settings import InputError, Resolved
from settings.loading.printing import from_yaml
from settings.schema.model import BUILTIN_PREFIX
from settings.schema.rollout import format_rounding
from settings.secrets import redact

CARD_FILE = "README.md"
TEMPLATE_FILE = "model_card.md.jinja"
TASK = "text-generation"
HUB_DATA_PREFIX = "hf:"

KEY_SETTINGS = (
    "model.path", "model.dtype", "data.source", "data.system_prompt", "reward.functions",
    "algorithm.name", "algorithm.beta", "optimizer.learning_rate", "rollout.prompts_per_step", "rollout.group_size",
    "rollout.max_new_tokens", "rollout.temperature", "run.steps", "run.seed",
)  # fmt: skip
"""Settings listed in every card."""
TEMPLATE_KWARGS = "data.chat_template_kwargs"
PATH_SETTINGS = ("model.path", "data.source", "data.eval_source")
"""Settings whose values are local paths, unless they name something built in or on the hub."""
PRIVATE_SETTINGS = ("run.dir", "run.name")
"""Settings never listed, because they are specific to a machine or shown elsewhere in the card."""


@dataclass(frozen=True)
class ExportFormat:
    """What the card says about a format of export."""

    weights_description: str
    library: str = "transformers"
    base_model_relation: str = "finetune"
    """Relation to the base model, in the hub's vocabulary."""
    imports: str = "from transformers import AutoModelForCausalLM, AutoTokenizer"
    model_class: str = "AutoModelForCausalLM"


FULL_MODEL = ExportFormat("The weights are those of the checkpoint")
MERGED_MODEL = ExportFormat("The weights are the base model's, with the adapters of the checkpoint merged into them")
ADAPTER = ExportFormat(
    "The weights are only the adapters of the checkpoint",
    library="peft",
    base_model_relation="adapter",
    imports="from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer",
    model_class="AutoPeftModelForCausalLM",
)


def export_notes(resolved: Resolved, model: ModelSpec, *, export_format: ExportFormat, dtype: str) -> Iterator[str]:
    """Yields notes on how the exported model differs from the one evaluated during the run."""
    quantization, rounding = model.policy_definition.quantization, resolved.settings.rollout.rounding
    if rounding:
        exact = " ".join(f"--set {name}=null" for name in rounding)
        yield (
            f"the run evaluated a rounded policy ({format_rounding(rounding)}), but this export is the policy without "
            "rounding; "
            f"`grpo evaluate` with `{exact}` measures it"
        )
    if export_format is MERGED_MODEL and dtype != "float32":
        yield (
            f"adapters merged in {dtype} lose small weight changes to rounding, perhaps most of what was learned; "
            "`grpo export --dtype float32` or `--adapter` keeps them"
        )
    if quantization is not None:
        yield (
            f"the adapters were trained on base weights quantized to {quantization} ({QUANTIZE_BASE_SETTING}); on the "
            "unquantized base, they result in a different model than the one evaluated during the run"
        )


def base_model_card(resolved: Resolved, model: ModelSpec, *, dtype: str) -> str:
    """Returns the README.md of an exported model that was not trained."""
    card_data = ModelCardData(library_name=FULL_MODEL.library, pipeline_tag=TASK, base_model=_hub_id(model))
    return _fill_in(
        _settings_by_name(resolved),
        card_data,
        title=f"{_short_name(model)} as a base model",
        origin=f"This is `{model.files.name}` without any training, as a run starts from it, {_precision(dtype)}.",
        export_format=FULL_MODEL,
    )


def model_card(
    resolved: Resolved, saved_policy: PolicyCheckpoint, model: ModelSpec, *, export_format: ExportFormat, dtype: str
) -> str:
    """Returns the README.md of an export; without results if the files of the run cannot be read."""
    run = _read_run_files(saved_policy.run)
    step = saved_policy.step
    settings = _settings_by_name(resolved)
    if run is not None:
        settings |= {name: value for name, (value, _) in run.settings_history.period_of(step).settings.items()}
    earlier = [
        change.before
        for first_step, change in (run.settings_history.changes if run else [])
        if first_step <= step and change.name == "algorithm.name"
    ]
    algorithms = " and ".join(dict.fromkeys([*earlier, settings["algorithm.name"]]))
    # The path of the opened model, which --set may have changed.
    settings["model.path"] = resolved.settings.model.path
    settings |= {name: _without_directories(settings[name], is_source=True) for name in PATH_SETTINGS}
    if (hub_id := _hub_id(model)) is not None:
        settings["model.path"] = f"{hub_id}@{model.files.commit}"
    chosen = settings["data.source"]
    sources = [chosen] if isinstance(chosen, str) else [one["source"] for one in chosen]
    notes = export_notes(resolved, model, export_format=export_format, dtype=dtype)
    weights = [f"{export_format.weights_description}, {_precision(dtype)}.", *(f"Note: {note}." for note in notes)]
    return _fill_in(
        settings,
        front_matter(export_format, hub_id, *sources),
        title=f"{_short_name(model)} after {format_count(step, 'step')} of {algorithms}",
        origin=f"`{model.files.name}`, trained with the algorithm `{algorithms}` on `{'`, `'.join(sources)}`: "
        f"step {step} of the run `{settings['run.name']}`, written by `grpo export`. {' '.join(weights)}",
        export_format=export_format,
        results="" if run is None else _results_section(run, settings, step=step),
        settings_table=_settings_table(settings, run),
    )


def _settings_by_name(resolved: Resolved) -> dict[str, Any]:
    return {name: value for name, (value, _) in from_yaml(resolved.to_yaml().encode(), name="settings").items()}


def _hub_id(model: ModelSpec) -> str | None:
    return model.files.name if model.files.commit is not None else None


def _short_name(model: ModelSpec) -> str:
    return model.files.name.rpartition("/")[2].removeprefix(BUILTIN_PREFIX)


def _precision(dtype: str) -> str:
    return "in float32" if dtype == "float32" else f"rounded once to {dtype}"


def _fill_in(
    settings: Mapping[str, Any],
    card_data: ModelCardData,
    *,
    title: str,
    origin: str,
    export_format: ExportFormat,
    results: str = "",
    settings_table: str = "",
) -> str:
    """Returns the text of a card: its metadata, the given texts, and instructions for use."""
    system = settings["data.system_prompt"]
    messages = [*([{"role": "system", "content": system}] if system else []), {"role": "user", "content": "..."}]
    card = ModelCard.from_template(
        card_data,
        template_str=(files("app.export") / TEMPLATE_FILE).read_text(encoding="utf-8"),
        title=title,
        origin=origin,
        results=results,
        settings_table=settings_table,
        format=export_format,
        messages=None if settings["data.chat_template"] == "none" else messages,
        template_arguments="".join(f", {name}={value!r}" for name, value in settings[TEMPLATE_KWARGS].items()),
        max_new_tokens=settings["rollout.max_new_tokens"],
    )
    return redact(f"{card}\n")


def _read_run_files(run: RunDirectory) -> RunFiles | None:
    """Returns the files of the run; None if the checkpoint was moved out of the run, or if they cannot be read."""
    if not (run.settings_path.is_file() and run.metrics_path.is_file()):
        return None
    try:
        return RunFiles.read(run.path)
    except InputError as error:
        print(f"note: the model card has no results of the run: {error}", file=sys.stderr)
        return None


def front_matter(export_format: ExportFormat, hub_id: str | None, *sources: str) -> ModelCardData:
    """Returns the metadata of a card, in the format of the Hugging Face hub.

    Args:
        hub_id: id of the base model; None if it is not on the hub, because cards accept only hub models as base.
        sources: the data of the run, as in `data.source`; only data sets on the hub are listed.
    """
    hub_data = [split_hub_source(one)[0] for one in sources if one.startswith(HUB_DATA_PREFIX)]
    return ModelCardData(
        library_name=export_format.library,
        pipeline_tag=TASK,
        base_model=hub_id,
        base_model_relation=None if hub_id is None else export_format.base_model_relation,
        datasets=hub_data or None,
        tags=["grpo", "reinforcement-learning"],
    )


def _results_section(run: RunFiles, settings: Mapping[str, Any], *, step: int) -> str:
    """Returns the section of the card with the evaluations of the run up to this step, and their settings."""
    history = [record for record in run.history if record["step"] <= step]
    result = before_and_after(history)
    reward = f"{result.pace[:1].upper()}{result.pace[1:]}."
    if not result.table:
        return reward if result.pace else "The run has no step and no evaluation yet."
    text = f"{_table(result.table[0], result.table[1:])}\n\n{reward}"
    limit, num_samples = settings["eval.num_prompts"], settings.get("eval.num_samples", 1)
    prompts = "All held-out prompts" if limit is None else f"At most {limit} held-out prompts"
    answers = "one answer" if num_samples == 1 else f"{num_samples} answers"
    source = settings["data.eval_source"] or settings["data.source"]
    best = best_evaluation(history, settings.get("checkpoint.best_metric"))
    text += f"\n\n{best}" if best else ""
    return f"{text}\n\n{prompts} of `{source}`, {answers} each at temperature {settings['eval.temperature']}."


def _settings_table(settings: Mapping[str, Any], run: RunFiles | None) -> str:
    """Returns a table of the key settings and of those that the user changed, except private and derived ones."""
    chosen = {setting.name for setting in run.non_default_settings() if setting.origin != "derived"} if run else set()
    rows = [
        (f"`{name}`", f"`{json.dumps(_without_directories(value), ensure_ascii=False)}`")
        for name, value in settings.items()
        if name in {*KEY_SETTINGS, *chosen} - {*PRIVATE_SETTINGS} and name.partition(".")[0] in WANDB_SECTIONS
    ]
    return _table(("setting", "value"), rows)


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; each cell is on one line, with pipes escaped."""
    lines = [header, ["---"] * len(header), *rows]
    cells = ([" ".join(cell.replace("|", "\\|").split()) for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _without_directories(value: Any, *, is_source: bool = False) -> Any:
    """Returns the value with every local path in it shortened to its last part.

    Args:
        is_source: whether a string is a path unless it names something built in or on the hub.
    """
    if isinstance(value, Mapping):
        return {
            name: _without_directories(item, is_source=is_source and name == "source") for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_without_directories(item, is_source=is_source) for item in value]
    if not isinstance(value, str):
        return value
    named_elsewhere = value.startswith((HUB_DATA_PREFIX, BUILTIN_PREFIX))
    is_local = value.startswith(("/", "~", "./", "../")) or (is_source and not named_elsewhere)
    return value.rstrip("/").rpartition("/")[2] if is_local else value

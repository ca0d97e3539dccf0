"""How a row becomes a prompt: which columns, which types, whether the chat template is applied."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from slime.config.config import Config
from slime.errors import UserError, a_type
from slime.models.vision import placeholder_runs
from slime.prompts.chat_template import (
    OWN_ARGUMENTS,
    TemplateRefuses,
    left_out_roles,
    left_out_tools,
    render_prompt,
    template_form,
    template_source,
)
from slime.prompts.conversation import (
    ConversationError,
    ImageParts,
    Messages,
    conversation_in,
    empty_roles,
    foreign_roles,
    misplaced_result,
    read_messages,
    read_tools,
    tools_of,
    unread_keys,
    unread_part_keys,
)
from slime.prompts.images import (
    ImagePrompts,
    ImageSources,
    Source,
    image_prompts,
    kept,
    read_teacher_prompt,
)
from slime.prompts.labels import compares_labels, label_path, read_label
from slime.prompts.preference_rows import (
    PreferenceColumns,
    count_images,
    holds_text,
    odd_pair,
    with_prompt,
)
from slime.prompts.problems import RowProblem, missing_keys, remark, usual_column
from slime.prompts.text_remarks import remarks_on_answers, remarks_on_text, repeated_message
from slime.samples.media import IMAGES
from slime.user_code.overrides import follows_old_plugin


@dataclass(frozen=True)
class RowFormat:
    """Columns and rendering.

    Attributes:
        raw_label: labels that are numbers stay numbers (--label-type raw); else they become text.
        rm_type: the built-in reward, unless a row's metadata names another.
        rm_type_of_all: the built-in reward of all rows, whatever their metadata names.
        own_reward: a user function gives rewards, so ``rm_type`` here and in rows has no effect.
        raw: keep chat messages as they are, whatever ``apply_chat_template`` says (supervised
            fine-tuning renders them together with the answers).
        preference: the columns of answers in preference learning; else None.
        metadata_required, tools_required: a flag names the column, so rows must have its key.
        images: how rows name their images; None in a text-only run.
        teacher_prompt_key: key of the metadata with another prompt for the teacher.
    """

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str = "tools"
    apply_chat_template: bool = False
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    raw_label: bool = False
    rm_type: str | None = None
    rm_type_of_all: str | None = None
    own_reward: bool = False
    raw: bool = False
    preference: PreferenceColumns | None = None
    metadata_required: bool = False
    tools_required: bool = False
    images: ImageSources | None = None
    teacher_prompt_key: str | None = None
    input_flag: str = "--input-key"
    label_flag: str = "--label-key"
    metadata_flag: str = "--metadata-key"
    tool_flag: str = "--tool-key"

    def __post_init__(self) -> None:
        """Check the arguments of the chat template.

        Raises:
            UserError: the chat template is given an argument that is not the user's to give.
        """
        if ours := sorted(OWN_ARGUMENTS & self.template_kwargs.keys()):
            raise UserError(
                f"--apply-chat-template-kwargs has {', '.join(ours)}",
                why="this is given to the chat template wherever messages are rendered, as the "
                "place needs it",
                fix="leave it out; tools are a column of the data (--tool-key)",
            )

    @staticmethod
    def of(config: Config, path: str | None = None) -> RowFormat:
        """Return the format of the training prompts of ``config``.

        Args:
            path: the data set, to which paths of images are relative; default: --prompt-data.
        """
        data = config.data
        reward = config.reward
        return RowFormat(
            input_key=data.input_key,
            label_key=data.label_key,
            metadata_key=data.metadata_key,
            tool_key=data.tool_key,
            apply_chat_template=data.apply_chat_template,
            template_kwargs=dict(data.apply_chat_template_kwargs),
            raw_label=keeps_raw_labels(config),
            rm_type=reward.rm_type,
            own_reward=bool(reward.custom_rm_path),
            raw=config.algorithm.trains_on_data,
            preference=_preference_columns(config),
            metadata_required=data.metadata_key != "metadata",
            tools_required=data.tool_key != "tools",
            images=ImageSources.of(config, path or data.prompt_data, config.images.multimodal_keys),
            teacher_prompt_key=config.distillation.opd_teacher_prompt_key,
        )


def check_label_key(config: Config, columns: Iterable[str] = ()) -> None:
    """Check that a flag names the column of labels, if the reward compares with labels.

    Args:
        columns: those of the data, if known: one of them may be suggested.
    Raises:
        UserError: no flag does.
    """
    rollout = config.rollout
    own = (
        config.reward.custom_rm_path,
        rollout.rollout_function_path,
        rollout.custom_generate_function_path,
        rollout.rollout_sample_hook_path,
    )
    rm_type = config.reward.rm_type
    if not compares_labels(rm_type) or any(own) or config.data.label_key is not None:
        return
    if not rewards_may_be_missing(config):
        name = usual_column("--label-key", columns)
        raise UserError(
            f"--rm-type {rm_type} compares responses with labels, and there are none",
            fix=f"pass --label-key {name}"
            if name
            else "pass --label-key with the column of the right answers",
        )


def rewards_may_be_missing(config: Config) -> bool:
    """Tell whether a run learns even if every reward is 0: from a teacher, with no filter of
    rewards."""
    return config.distillation.use_opd and config.rollout.dynamic_sampling_filter_path is None


def _preference_columns(config: Config) -> PreferenceColumns | None:
    facts = config.algorithm.preference
    if facts is None:
        return None
    keys = config.preference
    asked = config.origins["input_key"] != "default"
    if facts.takes_pairs:
        answers = {"chosen": keys.chosen_key, "rejected": keys.rejected_key}
        return PreferenceColumns(answers, prompt_required=asked)
    label = config.data.label_key or "label"
    return PreferenceColumns({"completion": keys.completion_key}, label, asked)


def keeps_raw_labels(config: Config) -> bool:
    """Tell whether labels that are numbers stay numbers."""
    return config.data.label_type == "raw" or follows_old_plugin(config, "label_type")


@dataclass
class Prompt:
    """One row, ready to be drawn.

    Attributes:
        text: text for the tokenizer, or chat messages when no template is applied.
        tokens: ids of a row that is already tokenised, else [].
        bare: the prompt before the template was applied (for `carries_template`).
        unread_columns, unread_keys: columns of the row, and keys of its messages, that nothing
            reads.
        where: the row's origin, "train.jsonl:17"; set when it is drawn.
        images: the row's images, in order of their places; of preferences those of the prompt,
            then those of each answer.
        image_tokens: number of image placeholders still to be added; 0 for preferences, whose
            answers are measured one by one.
        remarks: what of its messages may differ from what was meant.
    """

    text: str | Messages
    tokens: list[int]
    label: Any
    metadata: dict[str, Any]
    bare: str | Messages
    unread_columns: tuple[str, ...] = ()
    unread_keys: tuple[str, ...] = ()
    where: str = ""
    images: list[Source] = field(default_factory=list)
    image_tokens: int = 0
    remarks: list[RowProblem] = field(default_factory=list)


def read_prompt(row: dict[str, Any], form: RowFormat, tokenizer: Any) -> Prompt:
    """Check and render one row.

    Raises:
        RowProblem: a key is missing, a value has the wrong type, or the prompt is empty.
    """
    check_columns(row, form)
    if form.preference is not None:
        return _read_preference(row, form, form.preference, tokenizer)
    value = row[form.input_key]
    metadata = _metadata(row, form)
    of_teacher = _read_teacher_prompt(metadata, form)
    columns = _unread_columns(row, form)
    is_tokens = isinstance(value, list) and bool(value) and all(type(item) is int for item in value)
    try:
        conversation = None if is_tokens else conversation_in(value, form.input_key)
        beside = conversation[1] if conversation else None
        if not beside and (conversation or form.apply_chat_template):
            beside = tools_of(metadata)
        tools = _tools(row, form, beside)
        parts = _image_parts(form, tokenizer)
        messages = _messages(conversation[0], tools, form, parts=parts) if conversation else None
    except ConversationError as error:
        raise RowProblem.of(error) from error
    label = _read_label(row, form, metadata)
    if tools:
        metadata["tools"] = tools
    if is_tokens:
        text = _text_of_tokens(value, tokenizer)
        found = Prompt(text, value, label, metadata, "", columns, remarks=of_teacher)
        return _with_images(found, row, form, parts)
    prompt = _text(value, form) if messages is None else messages
    if isinstance(prompt, str) and parts is not None:
        prompt = parts.text(prompt)
        if not form.apply_chat_template:
            prompt = _surrounded(prompt, form, parts)
    keys = _unread_keys(messages, conversation, form, tokenizer)
    rendered = prompt
    remarks = [
        *of_teacher,
        *_odd_messages(messages or []),
        *_unread_parts(row, columns, prompt, form),
    ]
    remarks += _remarks_on_words(prompt, [label] if form.raw else [], form, tokenizer)
    if tools and isinstance(prompt, str) and not form.apply_chat_template and not form.own_reward:
        remarks.append(
            remark(
                "have tools beside a prompt that is plain text, in which nothing writes them",
                fix="write them into the prompt, or pass --apply-chat-template",
            )
        )
    if form.apply_chat_template and not form.raw:
        try:
            rendered = render_prompt(tokenizer, prompt, tools=tools or None, **form.template_kwargs)
        except TemplateRefuses as error:
            raise RowProblem("are refused by the chat template", error.why, error.fix) from error
        text = str(rendered)
        unwritten = left_out_tools(tools, text, template_form(tokenizer, **form.template_kwargs))
        remarks += left_out(left_out_roles(messages or [], text), unwritten)
        remarks += _answered(messages or [])
    found = Prompt(rendered, [], label, metadata, prompt, columns, tuple(sorted(keys)))
    found.remarks = remarks
    return _with_images(found, row, form, parts)


def check_columns(row: dict[str, Any], form: RowFormat) -> None:
    """Check that a row has all columns that flags name.

    Raises:
        RowProblem: it lacks some; all are named.
    """
    required: dict[str, str] = {}
    if form.preference is None or form.preference.prompt_required:
        required[form.input_flag] = form.input_key
    if form.preference is not None:
        required |= form.preference.required
    elif form.label_key is not None:
        required[form.label_flag] = label_path(row, form.label_key)[0]
    if form.metadata_required:
        required[form.metadata_flag] = form.metadata_key
    if form.tools_required:
        required[form.tool_flag] = form.tool_key
    if missing := {flag: key for flag, key in required.items() if key not in row}:
        raise (form.preference and form.preference.other_form(row)) or missing_keys(missing, row)


def _read_label(row: dict[str, Any], form: RowFormat, metadata: dict[str, Any]) -> Any:
    if form.label_key is None:
        return None
    rm_type = form.rm_type_of_all or metadata.get("rm_type") or form.rm_type
    return read_label(
        row,
        form.label_key,
        form.label_flag,
        raw=form.raw_label,
        rm_type="" if form.own_reward else str(rm_type or ""),
    )


def _text_of_tokens(tokens: list[int], tokenizer: Any) -> str:
    if tokenizer is None:
        return ""
    if not 0 <= max(tokens) < len(tokenizer):
        raise RowProblem(
            "have token ids that the tokenizer lacks",
            f"found {max(tokens)}, and its ids end at {len(tokenizer) - 1}",
            "tokenise the prompts with the tokenizer of --hf-checkpoint",
        )
    try:
        return str(tokenizer.decode(tokens))
    except OverflowError as error:
        raise RowProblem("have token ids that no vocabulary has", str(error)) from error


def _remarks_on_words(
    prompt: str | Messages, answers: list[Any], form: RowFormat, tokenizer: Any
) -> list[RowProblem]:
    """Remark on the words of a prompt and its answers.

    Args:
        answers: those that are trained on.
    """
    is_templated = form.apply_chat_template or (form.raw and isinstance(prompt, list))
    reads_images = form.images is not None
    found = list(
        remarks_on_text(
            prompt, answers, tokenizer, is_templated=is_templated, reads_images=reads_images
        )
    )
    if form.raw:
        found += remarks_on_answers(prompt, [one for one in answers if isinstance(one, str | list)])
    return found


def left_out(roles: list[str], tools: list[str]) -> Iterator[RowProblem]:
    """Yield the warnings about messages and tools that the chat template leaves out.

    Args:
        roles: those of the messages.
        tools: names.
    """
    if roles:
        yield remark(
            "have messages that the chat template leaves out",
            f"the first: of the role {', '.join(map(repr, roles))}",
            "give them a role that the template writes at their place, or remove them",
        )
    if tools:
        yield remark(
            "have tools that the chat template leaves out",
            f"the first: {', '.join(map(repr, tools))}",
            "describe them in a system message, or use a template that writes tools",
        )


def _odd_messages(messages: Messages) -> Iterator[RowProblem]:
    """Remark on messages that can be rendered and may not be what was meant."""
    if roles := foreign_roles(messages):
        yield remark(
            "have messages of a role that is none of system, user, assistant and tool",
            f"the first: {', '.join(map(repr, roles))}; the chat template is given it as it is",
            "name the roles as the model's chat template does",
        )
    if roles := empty_roles(messages):
        yield remark(
            "have messages that say nothing, which become empty turns",
            f"the first: of the role {', '.join(map(repr, roles))}",
            "write their text under 'content', or remove them",
        )
    if text := repeated_message(messages):
        yield remark(
            "have a message that repeats the one before it",
            f"the first: {text!r}",
            "remove one of them",
        )
    if result := misplaced_result(messages):
        yield remark(
            "have results of tools that do not follow their calls in order",
            f"the first: {result}",
            "put each result behind its call, in the order of the calls: many chat templates "
            "write no ids",
        )


#: Columns that hold a part of the prompt in some data sets, and the --input-key beside which they
#: do; None: any. "history" is LLaMA-Factory's, "functions" the tools of old OpenAI requests.
_PROMPT_COLUMNS = {
    "system": None, "system_prompt": None, "history": None, "functions": None,
    "input": "instruction",
}  # fmt: skip
#: Columns that hold what belongs to a prompt that is more than text.
_MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")


def _unread_parts(
    row: dict[str, Any], unread: Iterable[str], prompt: str | Messages, form: RowFormat
) -> list[RowProblem]:
    """Remark on parts of a prompt in columns that nothing reads.

    Args:
        unread: the columns that nothing reads.
    """
    media = [
        remark(
            f"have something in the column '{name}', which nothing reads",
            "the prompt is given to the model without it",
            "name the column of images with --multimodal-keys, or remove these rows",
        )
        for name in unread
        if name in _MEDIA_COLUMNS and row[name] not in ("", [], {})
    ]
    named = row.get("rm_type") if "rm_type" in unread else None
    if named and not form.raw and named != (form.rm_type_of_all or form.rm_type):
        media.append(
            remark(
                "name a reward in the column 'rm_type', which nothing reads",
                f"the first: {named!r:.80}",
                "write it into the metadata, {'rm_type': …}",
            )
        )
    parts = [
        name
        for name in unread
        if _PROMPT_COLUMNS.get(name, "") in (None, form.input_key)
        and (row[name].strip() if isinstance(row[name], str) else isinstance(row[name], list))
        and row[name] not in ("", [])
    ]
    if isinstance(prompt, list) and prompt[0]["role"] in ("system", "developer"):
        told = str(prompt[0]["content"]).strip()
        others = [name for name in parts if name in ("system", "system_prompt")]
        parts = [name for name in parts if name not in others]
        media += [
            remark(
                f"have another system prompt in the column '{name}', which nothing reads",
                f"the first: {row[name]!r:.80} beside {told[:80]!r}",
                "keep the one that is meant",
            )
            for name in others
            if isinstance(row[name], str) and row[name].strip() != told
        ]
    return media + [
        remark(
            f"have a part of the prompt in the column '{name}', which nothing reads",
            f"the first: {row[name]!r:.80}",
            "write it into the prompt; a system prompt as the first message, of the role system; "
            "tools into a column of their own (--tool-key)",
        )
        for name in parts
    ]


def _answered(messages: Messages) -> Iterator[RowProblem]:
    if messages and messages[-1]["role"] == "assistant":
        yield remark(
            "have prompts that end with a message of the assistant, after which it is asked again",
            f"the first ends with {messages[-1]['content'][-80:]!r}",
            "leave the last answer out, if the model is to find it",
        )


def inputs_of(prompt: Prompt, form: RowFormat) -> dict[str, Any] | None:
    """Return ``multimodal_inputs`` of the samples of a prompt; store images that came as bytes in
    the run's folder."""
    if form.images is None or not prompt.images:
        return None
    return {IMAGES: kept(prompt.images, form.images.folder)}


def _image_parts(form: RowFormat, tokenizer: Any) -> ImageParts | None:
    if form.images is None:
        return None
    images = image_prompts(form.images.model_path, form.images.max_pixels)
    return ImageParts(images.placeholder(tokenizer), reads_marks=True)


def _with_images(
    prompt: Prompt, row: dict[str, Any], form: RowFormat, parts: ImageParts | None
) -> Prompt:
    """Add the images of a row to its prompt.

    Raises:
        RowProblem: images do not match their places, or one cannot be read.
    """
    if form.images is None or parts is None:
        return prompt
    prompts = image_prompts(form.images.model_path, form.images.max_pixels)
    if prompt.tokens:
        runs = placeholder_runs(prompt.tokens, prompts.vision)
        parts.sources = [None] * len(runs)
        prompt.images = form.images.of_row(row, parts)
        prompt.image_tokens = _missing_placeholders([length for _, length in runs], prompt, prompts)
    else:
        prompt.images = form.images.of_row(row, parts)
        shown = parts.placeholder
        if isinstance(prompt.text, str) and not (form.raw and form.apply_chat_template):
            shown = _surrounded(shown, form, parts)
        _check_places(prompt.text, shown, len(prompt.images))
        prompt.image_tokens = prompts.num_tokens(prompt.images)
    _check_teacher_prompt(prompt, form, parts.placeholder)
    return prompt


def _read_teacher_prompt(metadata: dict[str, Any], form: RowFormat) -> list[RowProblem]:
    """Replace the teacher's own prompt that is the JSON text of messages by the messages.

    Returns:
        A remark on a row that has none.
    Raises:
        RowProblem: it is neither text nor messages.
    """
    key = form.teacher_prompt_key
    if key is None:
        return []
    given = metadata.get(key)
    if given is None:
        return [
            remark(
                f"have no prompt for the teacher (metadata '{key}'), which sees the row's prompt",
                f"the first has the metadata: {', '.join(map(str, metadata)) or 'none'}",
                "check --opd-teacher-prompt-key, unless a function of yours adds it",
            )
        ]
    try:
        talk = conversation_in(given, key)
    except ConversationError as error:
        raise RowProblem.of(error) from error
    if talk is not None:
        metadata[key] = talk[0]
    elif not isinstance(given, str) or not given.strip():
        raise RowProblem(
            f"have a prompt for the teacher (metadata '{key}') that is neither text nor messages",
            f"found {given!r:.80}",
            "write text or messages, or leave it out",
        )
    return []


def _check_teacher_prompt(prompt: Prompt, form: RowFormat, placeholder: str) -> None:
    """Check the images of a row's own prompt for the teacher.

    Raises:
        RowProblem: it has images that the row's prompt lacks.
    """
    given = prompt.metadata.get(form.teacher_prompt_key) if form.teacher_prompt_key else None
    if given is None:
        return
    try:
        read_teacher_prompt(given, placeholder, len(prompt.images))
    except UserError as error:
        raise RowProblem(
            f"have a prompt for the teacher (metadata '{form.teacher_prompt_key}') with other "
            "images",
            error.what,
            error.fix,
        ) from error


def _check_places(text: str | Messages, placeholder: str, num_images: int) -> None:
    """Check that a prompt or an answer has a placeholder for each image.

    Raises:
        RowProblem: the numbers differ.
    """
    written = count_images(text, placeholder)
    if written != num_images:
        raise RowProblem(
            "have placeholders of images in their text, or a chat template that leaves images out",
            f"{written} placeholders {placeholder!r} are written for {num_images} images",
            "remove these rows",
        )


def _surrounded(text: str, form: RowFormat, parts: ImageParts) -> str:
    """Return a text with what the model's processor writes around each image."""
    assert form.images is not None
    prompts = image_prompts(form.images.model_path, form.images.max_pixels)
    around = prompts.vision.kind.around
    return text.replace(parts.placeholder, f"{around}{parts.placeholder}{around}")


def _missing_placeholders(written: list[int], prompt: Prompt, prompts: ImagePrompts) -> int:
    """Count the placeholders that a tokenised prompt lacks.

    Args:
        written: number of placeholders of each image in the prompt.
    Raises:
        RowProblem: an image has neither one nor all of them.
    """
    missing = 0
    for number, (count, image) in enumerate(zip(written, prompt.images, strict=True), start=1):
        rows, columns = prompts.size(image)
        if count not in (1, rows * columns):
            raise RowProblem(
                "have other numbers of placeholders than their images have tokens",
                f"{count} for image {number}, which is {rows} x {columns} tokens",
                "write one placeholder for each image, or all of them",
            )
        missing += rows * columns - count
    return missing


def _read_preference(
    row: dict[str, Any], form: RowFormat, columns: PreferenceColumns, tokenizer: Any
) -> Prompt:
    """Read a row of preferences; ``label`` of the prompt is a dict of the answers and their
    label."""
    given = dict(columns.values(row))
    column = columns.prompt_column(row, form.input_key)
    label: dict[str, Any] = {} if columns.label is None else {"label": columns.read_label(row)}
    metadata = _metadata(row, form)
    read: dict[str, str | Messages] = {}
    keys_unread: set[str] = set()
    if column is not None:
        given["prompt"] = row[column]
    parts = {name: _image_parts(form, tokenizer) for name in given}
    keys = {name: columns.answers.get(name) or str(column) for name in given}
    try:
        talks = {name: conversation_in(value, keys[name]) for name, value in given.items()}
        beside = (talk[1] for talk in talks.values() if talk and talk[1])
        tools = _tools(row, form, next(beside, None) or tools_of(metadata))
        for name, value in given.items():
            own = replace(form, input_key=keys[name], input_flag=f"--{name}-key")
            what = "prompt" if name == "prompt" else "answer"
            own_parts = parts[name]
            if conversation := talks[name]:
                messages = _messages(conversation[0], tools, own, what, own_parts)
                keys_unread |= _unread_keys(messages, conversation, form, tokenizer)
                read[name] = messages
            else:
                text = _text(value, own, what)
                read[name] = text if own_parts is None else own_parts.text(text)
            if own_parts is not None:
                _check_places(read[name], own_parts.placeholder, len(own_parts.sources))
    except ConversationError as error:
        raise RowProblem.of(error) from error
    asked = read.pop("prompt", None)
    prompt, answers = with_prompt(asked, read)
    if tools:
        metadata["tools"] = tools
    unread = _unread_columns(row, form, (*columns.names, column))
    remarks = list(odd_pair(row, columns, answers))
    if isinstance(asked, str) and not holds_text(prompt, asked):
        unread = (*unread, str(column))
        remarks.append(
            remark(
                f"have another prompt in the column '{column}' than in their answers, which are "
                "whole conversations",
                f"the first: {asked[:80]!r}",
                "if it belongs to another row, the rows are mixed up; else remove the column",
            )
        )
    remarks += _unread_parts(row, unread, prompt, form)
    remarks += _remarks_on_words(prompt, list(answers.values()), form, tokenizer)
    if isinstance(prompt, list):
        remarks += [*_odd_messages(prompt), *_answered(prompt)]
    found = Prompt(prompt, [], answers | label, metadata, prompt, unread, remarks=remarks)
    found.unread_keys = tuple(sorted(keys_unread))
    given_parts = {name: one for name, one in parts.items() if one is not None}
    if form.images is not None and given_parts:
        everything = _parts_in_order(answers, given_parts)
        found.images = form.images.of_row(row, everything)
        if isinstance(prompt, str) and not form.apply_chat_template:
            found.text = _surrounded(prompt, form, everything)
            for name, answer in answers.items():
                assert isinstance(answer, str), "answers to text are text"
                found.label[name] = _surrounded(answer, form, everything)
    return found


def _parts_in_order(
    answers: Mapping[str, str | Messages], parts: Mapping[str, ImageParts]
) -> ImageParts:
    """Collect the images of the prompt, then those of each answer.

    Args:
        answers: without the prompt.
        parts: images of the columns, by name; answers may repeat the prompt and its images.
    Raises:
        RowProblem: the images of the prompt differ between columns.
    """
    own: list[Any] = []
    prompts = [one.sources for name, one in parts.items() if name not in answers]
    for name, answer in answers.items():
        sources = parts[name].sources
        repeated = len(sources) - count_images(answer, parts[name].placeholder)
        prompts.append(sources[:repeated])
        own += sources[repeated:]
    seen = [sources for sources in prompts if sources]
    if any(sources != seen[0] for sources in seen):
        raise RowProblem(
            "have answers whose prompts have different images",
            fix="both answers of a pair belong to one prompt",
        )
    placeholder = next(iter(parts.values())).placeholder
    return ImageParts(placeholder, sources=[*(seen[0] if seen else ()), *own])


def _unread_columns(
    row: dict[str, Any], form: RowFormat, more: tuple[str | None, ...] = ()
) -> tuple[str, ...]:
    label = label_path(row, form.label_key)[0] if form.label_key else None
    read = (form.input_key, label, form.metadata_key, form.tool_key, *more)
    if form.images is not None:
        read = (*read, form.images.column)
    return tuple(name for name, value in row.items() if name not in read and value is not None)


def _unread_keys(
    messages: Messages | None, talk: tuple[list[Any], Any] | None, form: RowFormat, tokenizer: Any
) -> set[str]:
    """Return the keys of messages and of their parts that nothing reads.

    Args:
        talk: the messages as the row has them.
    """
    if not messages or talk is None:
        return set()
    source = template_source(tokenizer)
    writes_names = not source or template_form(tokenizer, **form.template_kwargs).writes_names
    return unread_keys(messages, source, writes_names=writes_names) | unread_part_keys(talk[0])


def _text(value: Any, form: RowFormat, what: str = "prompt") -> str:
    key = form.input_key
    if not isinstance(value, str) and value != []:
        kind = "None" if value is None else a_type(value)
        named = "a prompt" if what == "prompt" else f"an {what}"
        kinds = "text or" if form.preference else "text,"
        ids = "" if form.preference else " or token ids"
        raise RowProblem(
            f"have {named} (key '{key}') that is not {kinds} chat messages{ids}",
            f"found {kind}",
            f"check {form.input_flag}; messages are [{{'role': …, 'content': …}}]",
        )
    if not value or not value.strip():
        raise RowProblem(f"have an empty {what} (key '{key}')", fix="remove these rows")
    return str(value)


def _messages(
    wire: list[Any],
    tools: list[dict[str, Any]],
    form: RowFormat,
    what: str = "prompt",
    parts: ImageParts | None = None,
) -> Messages:
    key = form.input_key
    # columnar files fill keys that only some records have with None
    messages = read_messages(wire, where=key, tools=tools, drops_nulls=True, images=parts)
    said = ("content", "value", "parts", "tool_calls", "function_call", "output", "arguments")
    if not any(message.get(name) is not None for message in wire for name in said):
        raise RowProblem(
            f"have messages without content (key '{key}')",
            f"the first one's keys are: {', '.join(wire[0])}",
            "a message is {'role': …, 'content': …}",
        )
    if not any(message["content"].strip() or message.get("tool_calls") for message in messages):
        raise RowProblem(f"have an empty {what} (key '{key}')", fix="remove these rows")
    return messages


def _metadata(row: dict[str, Any], form: RowFormat) -> dict[str, Any]:
    value = decoded(row.get(form.metadata_key))
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RowProblem(
            f"have metadata (key '{form.metadata_key}') that is not a dict",
            f"found {a_type(value)}",
        )
    return dict(value)


def _tools(row: dict[str, Any], form: RowFormat, beside: Any) -> list[dict[str, Any]]:
    """Read the tools of a row in OpenAI's form.

    Args:
        beside: tools in the same value as the messages or in the metadata; a column of tools
            takes precedence.
    """
    value = row.get(form.tool_key)
    given = beside if value in (None, "", []) else value
    return read_tools(given, where=form.tool_key, drops_nulls=True)


def decoded(value: Any) -> Any:
    """Decode JSON text, in which columnar files often hold nested values; integers keep all
    digits."""
    if isinstance(value, str) and value.strip():
        try:
            return json.loads(value, parse_constant=_no_json)
        except (ValueError, RecursionError):
            return value  # reported by type
    return value or None


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")

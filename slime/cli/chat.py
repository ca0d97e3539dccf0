"""`slime chat`: talk to a model in the terminal.

slime chat outputs/sums                            the newest model of a run, with its adapter
slime chat Qwen3-0.6B --adapter DIR                a model with an adapter
echo 'What is 17 + 25?' | slime chat Qwen3-0.6B    without a terminal: a question per line

/reset forgets the conversation, /system TEXT sets the system prompt and begins anew, /image FILE
goes with the next question, /quit leaves (Ctrl-D too); Ctrl-C ends an answer early.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime import deadlines
from slime.checkpoints.run_models import data_path, stage_configs
from slime.cli.arguments import Arguments, at_least_one
from slime.cli.model_source import ChosenModel, NamedModels, chosen_model, model_name, named_models
from slime.cli.serve import add_model_flags, leave_on_signals, serving
from slime.engines.keys import header_of, key_of
from slime.engines.tool_calls import chat_template
from slime.errors import RunFailed, UserError
from slime.files import read_lines
from slime.observe.run_folder import RunFolder
from slime.prompts.images import sees_images
from slime.prompts.problems import RowProblem
from slime.prompts.readers import iter_rows

#: A model with fewer bytes of weights knows only what its run taught it.
_TOY_BYTES = 20e6
#: Characters of the example question that are shown.
_EXAMPLE_LENGTH = 400
_COMMANDS = "/reset, /system TEXT, /image FILE, /quit"


def main(argv: list[str]) -> int:
    """Answer the lines of the terminal or of standard input. Returns the exit status."""
    flags = _parser().parse_args(argv)
    leave_on_signals()
    chosen = chosen_model(flags.path, flags.hf_checkpoint)
    models, name = _models(chosen, model_name(flags.path), flags.adapter)
    directory = chosen.directory
    sampling = {key: getattr(flags, key) for key in _SAMPLING if getattr(flags, key) is not None}
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        import readline  # noqa: F401  adds history and line editing to input()

        print(f"{name}: loading {chosen.adapter or directory} …", file=sys.stderr)
    trusted = flags.trust_remote_code
    with serving(
        directory,
        models.base,
        adapters=models.adapters,
        engine=flags.engine,
        trust_remote_code=trusted,
    ) as server:
        has_turns = chat_template(directory) is not None
        if not has_turns:
            print(
                "this model has no chat template: it continues each line as it stands",
                file=sys.stderr,
            )
        example = example_question(Path(flags.path))
        weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
        is_toy = example is not None and weights < _TOY_BYTES
        conversation = Conversation(
            server.url, name, sampling, flags.system, has_turns=has_turns, forgets=is_toy
        )
        conversation.sees = has_turns and sees_images(directory)
        if example is not None:
            print(f"the run's questions look like this: {example}", file=sys.stderr)
        if is_toy:
            print(
                "a toy model: it knows only questions of this form, each by itself", file=sys.stderr
            )
        if is_terminal:
            print(f"{_COMMANDS}; Ctrl-C ends an answer, Ctrl-D the chat", file=sys.stderr)
        _talk(conversation, is_terminal)
    return 0


def _models(chosen: ChosenModel, name: str, given: list[str]) -> tuple[NamedModels, str]:
    """Return the server's models, and the name of the model to chat with: the given adapter, else
    the run's model.

    Raises:
        UserError: several adapters are given.
    """
    if len(given) > 1:
        raise UserError(
            f"{len(given)} times --adapter",
            why="a chat is with one model",
            fix="pass one; slime serve takes several",
        )
    models = named_models(chosen, name, given)
    asked = [f"{models.base}:{one}" for one in models.adapters if one != models.own]
    return models, asked[-1] if asked else models.requested


def example_question(run_folder: Path) -> str | None:
    """Return a question from a run's samples or data, without the chat template.

    None if the path is not a run folder, or if neither samples nor data are found.
    """
    configs = stage_configs(run_folder) if run_folder.is_dir() else {}
    for stage, config in reversed(configs.items()):
        recorded = sorted(RunFolder(run_folder, stage or None).samples.glob("rollout_*.jsonl"))
        prompts = [record.get("prompt") for file in recorded[:1] for record in read_lines(file)[:1]]
        data = config.get("data", {})
        if data.get("apply_chat_template") or not prompts:  # it has the template around it
            path = data_path(run_folder, config)
            prompts = []
            with contextlib.suppress(UserError, RowProblem, OSError):  # the data may have moved
                rows = itertools.islice(iter_rows(path), 1) if path else ()
                prompts = [row.get(data.get("input_key")) for _, row in rows]
        if prompts and (text := _last_words_of_the_user(prompts[0])):
            return text if len(text) <= _EXAMPLE_LENGTH else text[:_EXAMPLE_LENGTH] + " …"
    return None


def _last_words_of_the_user(prompt: Any) -> str:
    if isinstance(prompt, list):
        questions = [
            turn["content"]
            for turn in prompt
            if isinstance(turn, dict) and turn.get("role") == "user"
        ]
        prompt = questions[-1] if questions else ""
    return prompt.strip() if isinstance(prompt, str) else ""


_SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "seed")


def _parser() -> Arguments:
    parser = Arguments("slime chat", __doc__)
    add_model_flags(parser)
    add = parser.add_argument
    add("--system", help="system prompt")
    add(
        "--temperature", type=float, help="0: always the likeliest token (default: the engine's, 1)"
    )
    add(
        "--top-p", type=float, help="sample among the likeliest tokens of this probability together"
    )
    add("--top-k", type=int, help="sample among so many of the likeliest tokens")
    add(
        "--max-tokens",
        type=at_least_one,
        default=1024,
        help="most tokens of an answer (default 1024)",
    )
    add("--seed", type=int, help="the same seed gives the same answers")
    return parser


def _talk(conversation: Conversation, is_terminal: bool) -> None:
    for line in _lines(is_terminal):
        command, _, rest = line.partition(" ")
        if command in ("/quit", "/exit"):
            return
        if command == "/reset":
            conversation.reset()
        elif command == "/system":
            conversation.system = rest.strip() or None
            conversation.reset()
        elif command == "/image":
            _show(conversation.attach(rest.strip()), is_terminal)
        elif command.startswith("/") and command[1:].isalpha():
            print(f"there is no {command}; there are {_COMMANDS}", file=sys.stderr)
        elif line:
            _show(conversation.ask(line), is_terminal)


def _lines(is_terminal: bool) -> Iterator[str]:
    """Yield lines from the terminal or from standard input, until end of file."""
    if not is_terminal:
        if isinstance(sys.stdin, io.TextIOWrapper):
            # some locales decode invalid bytes without an error
            sys.stdin.reconfigure(encoding="utf-8", errors="strict")
        try:
            yield from (line.strip() for line in sys.stdin)
        except UnicodeDecodeError as error:
            raise UserError(
                "a line of standard input is not UTF-8", why=str(error), fix="convert it first"
            ) from error
        return
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            yield input("\n> ").strip()


def _show(pieces: Iterator[str], is_terminal: bool) -> None:
    """Print an answer as it streams. In a terminal, Ctrl-C ends it and keeps the part so far.

    Raises:
        UserError: the server refuses a request that no terminal sent, or the server has died.
    """
    try:
        with contextlib.closing(pieces):  # type: ignore[type-var]
            for piece in pieces:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if not is_terminal:
            raise
        print(" …", end="")
    except UserError as error:
        if not is_terminal or isinstance(error, RunFailed):
            raise
        print(f"error: {error}", end="", file=sys.stderr)
    print(flush=True)


class Conversation:
    """A conversation with a model over OpenAI's API.

    Args:
        sampling: sampling parameters of the requests, under OpenAI's names.
        system: system prompt.
        has_turns: the model has a chat template; without one, it completes each line by itself.
        forgets: each question begins a new conversation.
    """

    def __init__(
        self,
        url: str,
        model: str,
        sampling: dict[str, Any],
        system: str | None = None,
        *,
        has_turns: bool = True,
        forgets: bool = False,
    ) -> None:
        self.system = system
        self._forgets = forgets
        self._address = urlsplit(url).netloc
        self._model = model
        self._sampling = sampling
        self._has_turns = has_turns
        self._key = header_of(key_of(url))
        self._turns: list[dict[str, Any]] = []
        self._images: list[dict[str, Any]] = []
        self.sees = False

    def reset(self) -> None:
        """Forget the conversation; the system prompt stays."""
        self._turns = []
        self._images = []

    def attach(self, path: str) -> Iterator[str]:
        """Attach an image to the next question; yields the line to print.

        Raises:
            UserError: the model takes no images, or the file cannot be read as an image.
        """
        from slime.models.decode_image import decoded, for_engine
        from slime.models.vision import ImageError

        if not self.sees:
            raise UserError("this model takes no images, or has no image processor")
        try:
            data = Path(path).read_bytes()
            decoded(data)
        except (OSError, ImageError) as error:
            raise UserError(f"{path} cannot be read as an image", why=str(error)) from error
        url = {"url": f"data:image;base64,{base64.b64encode(for_engine(data)).decode('ascii')}"}
        self._images.append({"type": "image_url", "image_url": url})
        yield f"{Path(path).name} goes with the next question"

    def ask(self, text: str) -> Iterator[str]:
        """Yield the answer piece by piece. The conversation keeps the pieces that were read, even
        if the caller stops early.

        Raises:
            UserError: the server refuses, for example because the conversation is too long.
            RunFailed: the server does not answer any more.
        """
        if not self._has_turns:
            yield from self._stream(
                "/v1/completions", {"prompt": text}, lambda choice: choice["text"]
            )
            return
        content = [*self._images, {"type": "text", "text": text}] if self._images else text
        self._images = []
        question = {"role": "user", "content": content}
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"messages": [*system, *self._turns, question]}
        pieces: list[str] = []
        try:
            for piece in self._stream(
                "/v1/chat/completions", body, lambda choice: choice["delta"].get("content") or ""
            ):
                pieces.append(piece)
                yield piece
        finally:
            if pieces and not self._forgets:
                self._turns += [question, {"role": "assistant", "content": "".join(pieces)}]

    def _stream(self, path: str, body: dict[str, Any], text_of: Any) -> Iterator[str]:
        # http.client ignores proxy settings
        connection = http.client.HTTPConnection(self._address, timeout=deadlines.CHAT_NEXT_PIECE)
        try:
            sent = json.dumps(
                {"model": self._model, "stream": True, **self._sampling, **body}
            ).encode()
            connection.request(
                "POST", path, sent, {"Content-Type": "application/json", **self._key}
            )
            answer = connection.getresponse()
            if answer.status != 200:
                refusal = json.loads(answer.read())
                raise UserError(
                    refusal.get("error", refusal)["message"],
                    fix="/reset begins anew" if len(self._turns) else "",
                )
            for line in answer:
                if line.startswith(b"data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        if piece := text_of(choice):
                            yield piece
        except (OSError, http.client.HTTPException) as error:
            raise RunFailed("the engine gives no answer any more", why=str(error)) from error
        finally:
            connection.close()  # the server then stops generating an abandoned answer

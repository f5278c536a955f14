"""The flags of `vegas_jax.decode`: definitions, and the frozen configs that they spell.

The flags live in a `FlagValues` of their own, made afresh by each call: importing the module twice
(`python -m` does) or calling `main` twice in one process neither clashes nor remembers anything.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any, get_args

from absl import flags

from pallas_kernels.dispatch import KERNELS
from vegas_jax.config import Acceptance, Method, SamplingParams, ScoreMode, ScoreRows, SpecConfig
from vegas_jax.text import Channels

DTYPES = ("auto", "float32", "bfloat16", "float16")

_ESCAPE = re.compile(r"\\(n|t|r|\\|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4})")
_SIMPLE_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


class _IntegersParser(flags.ArgumentParser):
    """`3` or `1,2,3`, as a tuple of ints; empty is the empty tuple."""

    syntactic_help = "integers separated by commas"

    def parse(self, argument: Any) -> tuple[int, ...]:
        if not isinstance(argument, str):
            return tuple(argument)
        try:
            return tuple(int(part) for part in argument.split(",")) if argument.strip() else ()
        except ValueError:
            raise ValueError("must be integers separated by commas") from None


class _IntegerOrNoneParser(flags.ArgumentParser):
    """An integer, or the word `none`."""

    syntactic_help = "an integer or none"

    def parse(self, argument: Any) -> int | None:
        if not isinstance(argument, str):
            return int(argument)
        try:
            return None if argument.lower() == "none" else int(argument)
        except ValueError:
            raise ValueError("must be an integer or none") from None


class _ObjectParser(flags.ArgumentParser):
    """A JSON object, as a dict."""

    syntactic_help = "a JSON object"

    def parse(self, argument: Any) -> dict[str, Any]:
        try:
            value = json.loads(argument)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ValueError('must be a JSON object such as {"enable_thinking": false}')
        return value


def define() -> flags.FlagValues:
    """All flags with their defaults, which are those of `SpecConfig` and `SamplingParams`."""
    values = flags.FlagValues()
    _define_input(values)
    _define_chat(values)
    _define_speculation(values)
    _define_sampling(values)
    _define_running(values)
    flags.DEFINE_boolean("help", False, "Show this help.", short_name="h", flag_values=values)
    return values


def parse(argv: Sequence[str]) -> flags.FlagValues:
    """Parses the arguments (without the program's name).

    Raises absl's `flags.Error` for an unknown flag, a bad value or an argument that is no flag.
    """
    values = define()
    hint = "give prompts with --prompt or --prompt_file"
    parse_into(values, "vegas_jax.decode", argv, hint)
    return values


def parse_into(values: flags.FlagValues, program: str, argv: Sequence[str], hint: str) -> None:
    """Parses a program's arguments; absl's `flags.Error` as in `parse`, `hint` for no flag."""
    values.set_gnu_getopt(True)
    try:
        rest = values([program, *argv])[1:]
    except UnicodeDecodeError as error:  # absl reads flagfiles as text and lets this through
        raise flags.Error(f"the flagfile is not UTF-8: bad byte at offset {error.start}") from None
    if rest:
        raise flags.Error(f"unexpected argument {rest[0]!r}: {hint}")


def spec_config(values: flags.FlagValues) -> SpecConfig:
    """The `SpecConfig` that the flags spell; InputError for a value out of range."""
    names = [field.name for field in dataclasses.fields(SpecConfig)]
    return SpecConfig(**{name: getattr(values, name) for name in names})


def sampling_params(values: flags.FlagValues) -> SamplingParams:
    """The `SamplingParams` that the flags spell; InputError for a value out of range."""
    settings = {f.name: getattr(values, f.name) for f in dataclasses.fields(SamplingParams)}
    seeds = settings["seed"]
    settings["seed"] = seeds[0] if len(seeds) == 1 else seeds
    settings["stop"] = tuple(unescape(text) for text in settings["stop"])
    return SamplingParams(**settings)


def unescape(text: str) -> str:
    r"""Replaces \n, \t, \r, \\, \xHH and \uHHHH; any other backslash stands for itself."""

    def character(match: re.Match[str]) -> str:
        code = match[1]
        return _SIMPLE_ESCAPES[code] if code in _SIMPLE_ESCAPES else chr(int(code[1:], 16))

    return _ESCAPE.sub(character, text)


def _define_input(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "checkpoint",
        "codelm-16m",
        "Hugging Face or Orbax folder, GGUF file, or the shipped name.",
        values,
    )
    flags.DEFINE_multi_string(
        "prompt", [], "Prompt, taken as it is. Repeat it for prompt-0, prompt-1, ...", values
    )
    flags.DEFINE_multi_string(
        "prompt_file",
        [],
        "Files or globs (** descends into folders), separated by commas or repeated. A .jsonl file"
        " holds one prompt a line, named by its 'id' or as file.jsonl:LINE; any other file is one"
        " prompt, named by its path. A file that several globs match is read once.",
        values,
    )
    flags.DEFINE_string(
        "prompt_field", "text", "Field of a JSONL line: a string or a list of token ids.", values
    )
    flags.DEFINE_boolean(
        "join_files",
        False,
        "Make one prompt, named joined-files, of all text files: in the order of --prompt_file,"
        " sorted within a glob, each under a line '# file: PATH'. Empty files are left out.",
        values,
    )
    flags.DEFINE_integer(
        "max_prompt_tokens",
        None,
        "Keep only the LAST so many tokens of each prompt.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_string(
        "output",
        None,
        "JSONL file that gets one record for each finished prompt. Rerunning the same command does"
        " only the prompts whose id it lacks. Without it the texts go to stdout.",
        values,
    )


def _define_chat(values: flags.FlagValues) -> None:
    flags.DEFINE_boolean(
        "chat",
        False,
        "Put each prompt through the checkpoint's chat template, as what a user says. A JSONL line"
        " may then have 'messages', a list of {role, content}, instead of its prompt.",
        values,
    )
    flags.DEFINE_string("system", None, "System message that goes before each chat.", values)
    flags.DEFINE_string(
        "chat_template", None, "Jinja file to use instead of the checkpoint's template.", values
    )
    flags.DEFINE(
        _ObjectParser(),
        "chat_template_kwargs",
        None,
        'What else the template knows, as a JSON object: {"enable_thinking": false}.',
        values,
    )
    flags.DEFINE_enum(
        "channels",
        "final",
        list(get_args(Channels)),
        "Which channels of a chat's reply to show, where the checkpoint writes channels (gpt-oss):"
        " the final one, or each under its name. --stop looks only at what is shown.",
        values,
    )


def _define_speculation(values: flags.FlagValues) -> None:
    spec = SpecConfig()

    def integer(name: str, text: str) -> None:
        flags.DEFINE_integer(name, getattr(spec, name), text, flag_values=values)

    def choice(name: str, literal: Any, text: str) -> None:
        flags.DEFINE_enum(name, getattr(spec, name), list(get_args(literal)), text, values)

    choice("method", Method, "How drafts choose their keys; plain does not draft.")
    integer("num_speculative_tokens", "Drafts per round (gamma).")
    flags.DEFINE_float(
        "sparse_ratio",
        spec.sparse_ratio,
        "Share of the context that a draft attends to.",
        flag_values=values,
    )
    integer("sparse_min_tokens", "... but at least so many keys.")
    integer("sparse_block_size", "Choose keys in aligned blocks of 1, 8, 16, 32 or 64.")
    flags.DEFINE(
        _IntegersParser(),
        "score_pool",
        spec.score_pool,
        "BACK,AHEAD: rank position i by the mean score of i-AHEAD .. i+BACK; 0,0 as published.",
        values,
    )
    choice("score_mode", ScoreMode, "Rank by attention probability or by logit (the paper).")
    choice("score_rows", ScoreRows, "Verified tokens whose queries score the keys.")
    flags.DEFINE_boolean(
        "per_kv_head", spec.per_kv_head, "Choose one set per KV head, not one per layer.", values
    )
    choice(
        "acceptance",
        Acceptance,
        "rejection keeps the distribution, with most tokens a round; coupled keeps the very tokens"
        " of plain sampling. Greedy decoding is both.",
    )


def _define_sampling(values: flags.FlagValues) -> None:
    sampling = SamplingParams()

    def number(name: str, text: str) -> None:
        flags.DEFINE_float(name, getattr(sampling, name), text, flag_values=values)

    flags.DEFINE(
        _IntegerOrNoneParser(),
        "max_new_tokens",
        sampling.max_new_tokens,
        "Tokens to add; none goes on until the model stops or --max_len is reached.",
        values,
    )
    number("temperature", "0 is greedy.")
    flags.DEFINE_integer("top_k", sampling.top_k, "0 is off.", flag_values=values)
    number("top_p", "1 is off.")
    number("min_p", "Drop tokens less likely than so many times the likeliest; 0 is off.")
    number("repetition_penalty", "1 is off.")
    number("presence_penalty", "0 is off.")
    number("frequency_penalty", "0 is off.")
    flags.DEFINE(
        _IntegersParser(), "seed", (sampling.seed,), "One seed, or one for each prompt.", values
    )
    flags.DEFINE_multi_string(
        "stop",
        [],
        r"Text to stop before; repeat it for several. \n \t \r \\ \xHH \uHHHH are understood.",
        values,
    )
    flags.DEFINE(
        _IntegersParser(), "stop_token_ids", sampling.stop_token_ids, "More stop tokens.", values
    )
    flags.DEFINE_boolean(
        "ignore_eos", sampling.ignore_eos, "Continue past end-of-sequence tokens.", values
    )
    flags.DEFINE_boolean(
        "logprobs", sampling.logprobs, "Add each token's log-probability to the records.", values
    )


def _define_running(values: flags.FlagValues) -> None:
    flags.DEFINE_integer(
        "max_len",
        None,
        "Prompt + completion tokens to make room for; by default what the longest prompt needs.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "batch_size", 1, "Prompts decoded at a time.", lower_bound=1, flag_values=values
    )
    flags.DEFINE_enum("dtype", "auto", list(DTYPES), "Compute type; auto suits the device.", values)
    flags.DEFINE_boolean(
        "dequantize",
        False,
        "Widen experts stored as MXFP4 when they are loaded: four times their memory, less work.",
        values,
    )
    flags.DEFINE_enum("kernels", "auto", list(KERNELS), "Which implementations to run.", values)
    flags.DEFINE_string(
        "mesh",
        None,
        "Devices to share the work, such as data:2,model:4: sequences are split over the data axis,"
        " heads and experts over the model axis.",
        values,
    )
    flags.DEFINE_boolean(
        "distributed",
        False,
        "Run this same command on every host (or process) of a cluster: --mesh is over the devices"
        " of all. The first one prints and writes files.",
        values,
    )
    flags.DEFINE_boolean(
        "stream", False, "Print the text round by round, prompt by prompt, in colour.", values
    )
    flags.DEFINE_boolean(
        "compare_plain", False, "Decode plainly afterwards and compare speed and tokens.", values
    )
    flags.DEFINE_string(
        "trace",
        None,
        "Folder for a profile of the decoding, for Perfetto or TensorBoard.",
        values,
    )

"""Two models that compute the same function, and texts that they continue."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

import vegas_jax
from benchmarks.texts import windows
from benchmarks.widen import widen, widen_cache, widen_selection
from vegas_jax import KVCache, ModelConfig, Processors, SamplingParams, SpecConfig
from vegas_jax.compiled import begin_jit, decode_jit, prefill_slot
from vegas_jax.model.forward import Params
from vegas_jax.model.transformer import Transformer
from vegas_jax.spec import DecodeState, init_state, new_requests
from vegas_jax.text.tokenizer import Tokenizer

QWEN3_8B = ModelConfig(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)
SMALL = ModelConfig(
    vocab_size=8448,
    hidden_size=384,
    intermediate_size=1024,
    num_layers=9,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Models:
    """The shipped checkpoint, and what `benchmarks.widen` makes of it."""

    small: Transformer
    small_params: Params
    wide: Transformer
    wide_params: Params
    tokenizer: Tokenizer

    @classmethod
    def load(cls, config: ModelConfig, dtype: str | None) -> "Models":
        """`dtype` as in `vegas_jax.load`."""
        small, small_params, tokenizer = vegas_jax.load(dtype=dtype)
        assert tokenizer is not None
        return cls(small, small_params, *widen(small, small_params, config), tokenizer)


class Decoding:
    """A large model about to continue a batch of sequences.

    Attributes:
      model: the large one.
      params: its weights.
      batch: B, sequences.
      rows: S, tokens of a sequence and its continuation.
      new_tokens: of the continuation.
      temperature: of sampling.
    """

    model: Transformer
    params: Params
    batch: int
    rows: int
    new_tokens: int
    temperature: float

    @property
    def length(self) -> int:
        """Tokens before the continuation; the last round of drafts needs room as well."""
        return self.rows - self.new_tokens - 16

    @property
    def max_len(self) -> int:
        """Tokens of a sequence and its continuation."""
        return self.length + self.new_tokens

    @property
    def sampling(self) -> SamplingParams:
        """Sequences end at different places; none may end a measurement early."""
        return SamplingParams(
            max_new_tokens=self.new_tokens, temperature=self.temperature, ignore_eos=True
        )

    @property
    def processors(self) -> Processors:
        """What `sampling` needs."""
        return Processors.of(self.sampling)

    def empty(self, model: Transformer, spec: SpecConfig) -> DecodeState:
        """Slots that nothing has begun in."""
        return init_state(model, spec, self.sampling, batch=self.batch, max_len=self.max_len)

    def begin_large(self, spec: SpecConfig) -> DecodeState:
        """The large model's state, about to draft for the first time."""
        raise NotImplementedError

    def begin_with(
        self,
        spec: SpecConfig,
        model: Transformer,
        params: Params,
        cache: KVCache,
        last_tokens: np.ndarray,
    ) -> DecodeState:
        """A model's state, with a cache of all tokens but the last; it is donated."""
        requests = new_requests(
            model.config,
            spec,
            self.sampling,
            batch=self.batch,
            max_len=self.max_len,
            limits=jnp.full((self.batch,), self.new_tokens, jnp.int32),
            seeds=tuple(range(self.batch)),
        )
        return begin_jit(
            model=model,
            params=params,
            state=self.empty(model, spec).replace(cache=cache),
            requests=requests,
            last_tokens=last_tokens,
            lengths=np.full(self.batch, self.length - 1, np.int32),
            slots=np.arange(self.batch, dtype=np.int32),
            spec=spec,
            processors=self.processors,
        )


@dataclasses.dataclass(frozen=True)
class Workload(Decoding):
    """Texts that the small model has read.

    Attributes:
      models: see there.
    """

    models: Models
    batch: int
    rows: int
    new_tokens: int
    temperature: float = 0.8

    @property
    def model(self) -> Transformer:  # type: ignore[override]
        """The wide one."""
        return self.models.wide

    @property
    def params(self) -> Params:  # type: ignore[override]
        """The wide one's."""
        return self.models.wide_params

    @functools.cached_property
    def texts(self) -> list[list[int]]:
        """Token ids [B][length]."""
        return windows(self.models.tokenizer, self.length, self.batch)

    @functools.cached_property
    def small_cache(self) -> KVCache:
        """All tokens of the texts but the last, read by the small model."""
        cache = self.empty(self.models.small, SpecConfig()).cache
        for slot, text in enumerate(self.texts):
            cache = prefill_slot(
                self.models.small, self.models.small_params, cache, text[:-1], slot
            )
        return jax.block_until_ready(cache)

    def begin(self, spec: SpecConfig) -> DecodeState:
        """The small model's state, about to draft for the first time."""
        cache = jax.tree.map(jnp.copy, self.small_cache)
        last_tokens = np.array([text[-1] for text in self.texts], np.int32)
        return self.begin_with(
            spec, self.models.small, self.models.small_params, cache, last_tokens
        )

    def decode_small(self, spec: SpecConfig) -> DecodeState:
        """The small model's state when all continuations are written."""
        return decode_jit(
            model=self.models.small,
            params=self.models.small_params,
            state=self.begin(spec),
            spec=spec,
            processors=self.processors,
            max_rounds=np.int32(2**31 - 1),
            stop_on_any_done=np.bool_(False),
        )

    def begin_large(self, spec: SpecConfig) -> DecodeState:
        """The state of `begin`, as the wide model would have it."""
        state = self.begin(spec)
        old, config = self.models.small.config, self.models.wide.config
        selection = state.selection
        if selection is not None:
            selection = widen_selection(old, config, selection)
        cache = widen_cache(old, config, state.cache)
        return jax.block_until_ready(state.replace(cache=cache, selection=selection))

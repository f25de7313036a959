"""A small decoder-only transformer, its log-probabilities, and sampling from it.

Owns the network and how tokens are drawn. Does not know the task beyond the end token it is given, nor training.

Randomness comes with the rows: each row brings a seed of its own, so what is sampled for it depends neither on the
rank it lands on nor on the rows beside it (rounding aside), and nothing has to be saved to continue a run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["ModelConfig", "Transformer", "generate", "response_log_probs"]

#: Keys and values of one layer, each ``(rows, heads, tokens, head width)``.
LayerCache = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a :class:`Transformer`.

    Parameters
    ----------
    vocab_size, context_length : int
        Number of different tokens, and of tokens in the longest sequence.
    num_layers, num_heads, width : int
        The defaults make about 340,000 parameters.
    """

    vocab_size: int
    context_length: int
    num_layers: int = 3
    num_heads: int = 4
    width: int = 96


class Block(nn.Module):
    """Self-attention and a feed-forward layer, normalised before each."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.feed_forward_norm = nn.LayerNorm(config.width)
        self.feed_forward_in = nn.Linear(config.width, 4 * config.width)
        self.feed_forward_out = nn.Linear(4 * config.width, config.width)

    def forward(self, hidden: Tensor, cache: LayerCache | None) -> tuple[Tensor, LayerCache]:
        """Return the new hidden states and the keys and values seen so far."""
        rows, length, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(rows, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        if cache is not None:
            key, value = torch.cat((cache[0], key), dim=2), torch.cat((cache[1], value), dim=2)
        # Behind a cache the only query is the newest token, which may look at every key: no mask.
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=cache is None)
        hidden = hidden + self.attention_out(mixed.transpose(1, 2).reshape(rows, length, width))
        activated = functional.gelu(self.feed_forward_in(self.feed_forward_norm(hidden)), approximate="tanh")
        return hidden + self.feed_forward_out(activated), (key, value)


class Transformer(nn.Module):
    """Next-token logits for sequences of tokens.

    Parameters
    ----------
    config : ModelConfig
    seed : int
        Seeds the initial weights; equal seeds give equal weights on every rank.
    """

    def __init__(self, config: ModelConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        # PyTorch's own initial weights: with those of GPT-2 (all at 0.02) this width learns many times slower.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.token_embedding = nn.Embedding(config.vocab_size, config.width)
            self.position_embedding = nn.Embedding(config.context_length, config.width)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
            self.norm = nn.LayerNorm(config.width)
            self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, caches: list[LayerCache] | None = None) -> tuple[Tensor, list[LayerCache]]:
        """Run the network over `tokens`, which follow those already in `caches`.

        Parameters
        ----------
        tokens : Tensor
            Shape ``(rows, length)``, int64; length 1 where there are caches.
        caches : list of tuple of Tensor, optional
            One per layer, as returned by the call before.

        Returns
        -------
        logits : Tensor
            Shape ``(rows, length, vocab_size)``, float32.
        caches : list of tuple of Tensor
        """
        start = 0 if caches is None else caches[0][0].shape[2]
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        hidden = self.token_embedding(tokens) + self.position_embedding(positions)
        new_caches = []
        for index, block in enumerate(self.blocks):
            hidden, new_cache = block(hidden, None if caches is None else caches[index])
            new_caches.append(new_cache)
        return self.head(self.norm(hidden)), new_caches


def response_log_probs(model: Transformer, prompts: Tensor, responses: Tensor) -> Tensor:
    """Return the log-probability of each token of the responses, given all tokens before it.

    Parameters
    ----------
    model : Transformer
    prompts : Tensor
        Shape ``(rows, prompt_length)``, int64.
    responses : Tensor
        Shape ``(rows, response_length)``, int64.

    Returns
    -------
    Tensor
        Shape ``(rows, response_length)``, float32; carries gradients unless called under ``torch.no_grad``.
    """
    tokens = torch.cat((prompts, responses), dim=1)
    logits, _ = model(tokens[:, :-1])
    log_probs = logits[:, prompts.shape[1] - 1 :].log_softmax(dim=-1)
    return log_probs.gather(-1, responses.unsqueeze(-1)).squeeze(-1)


def _uniform_per_row(row_seeds: Tensor, length: int) -> Tensor:
    """Draw `length` numbers in [0, 1) for each row, from that row's own seed."""
    generator = torch.Generator()
    drawn = torch.empty(len(row_seeds), length)
    for row, seed in enumerate(row_seeds.tolist()):
        torch.rand(length, generator=generator.manual_seed(seed), out=drawn[row])
    return drawn


@torch.no_grad()
def generate(
    model: Transformer, prompts: Tensor, row_seeds: Tensor, *, length: int, eos_id: int, temperature: float = 1.0
) -> Tensor:
    """Sample one response for each prompt.

    Parameters
    ----------
    model : Transformer
    prompts : Tensor
        Shape ``(rows, prompt_length)``, int64; all rows full, none padded.
    row_seeds : Tensor
        Shape ``(rows,)``, int64, not negative.
    length : int
        Number of tokens in a response.
    eos_id : int
        Ends a response; the rest of the row is filled with it.
    temperature : float
        0 takes the likeliest token each time; 1 samples from the model as it is.

    Returns
    -------
    Tensor
        Shape ``(rows, length)``, int64.

    Notes
    -----
    Keys and values of earlier tokens are kept, so each new token costs one position. A token is drawn by inverting
    the cumulative distribution at the row's own uniform number.
    """
    if temperature < 0:
        raise ValueError(f"temperature must not be negative, got {temperature}")
    uniform = _uniform_per_row(row_seeds, length) if temperature > 0 else None
    is_done = torch.zeros(len(prompts), dtype=torch.bool)
    responses = torch.full((len(prompts), length), eos_id, dtype=torch.int64)
    caches: list[LayerCache] | None = None
    tokens = prompts
    for position in range(length):
        logits, caches = model(tokens, caches)
        if uniform is None:
            chosen = logits[:, -1].argmax(dim=-1)
        else:
            cumulative = (logits[:, -1] / temperature).softmax(dim=-1).cumsum(dim=-1)
            # Rounding may leave the last sum a little off 1: scale, so that no draw falls behind the last token.
            threshold = uniform[:, position : position + 1] * cumulative[:, -1:]
            chosen = (cumulative <= threshold).sum(dim=-1).clamp(max=cumulative.shape[1] - 1)
        chosen = torch.where(is_done, eos_id, chosen)
        responses[:, position] = chosen
        is_done |= chosen == eos_id
        tokens = chosen.unsqueeze(1)
    return responses

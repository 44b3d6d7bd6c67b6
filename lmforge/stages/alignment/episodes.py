"""Episodes: completions of several turns, in which an environment answers what was sampled.

All episodes of a set take their turns together: the answers of a turn are sampled, then the environment replies to each. Ids
are only appended. What an environment is, and its processes, are in environments/.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from lmforge.data.chat.preferences import TokenizedPrompt
from lmforge.data.order import derive_key
from lmforge.environments.appending import TurnEncoder
from lmforge.environments.environment import Message
from lmforge.environments.process import EnvironmentPool, EpisodeReply
from lmforge.errors import UserError
from lmforge.stages.alignment.completions import SampledCompletion
from lmforge.stages.alignment.sampling import SampleRequest, SamplingSession, sample_all


@dataclass
class Episode:
    """A prompt, and what came after it: ids, and the same as messages. `error`: why the environment failed, if it did."""

    prompt_ids: list[int]
    messages: Sequence[Message]
    completion: SampledCompletion = field(default_factory=SampledCompletion)
    turns: list[Message] = field(default_factory=list)
    error: str = ""

    def describe(self) -> str:
        """The turns as text."""
        lines = []
        for message in self.turns:
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
            lines.append(f"{message['role']}: " + "\n".join(filter(None, [message["content"], *calls])))
        return "\n".join(lines)


class EpisodePlayer:
    """Plays episodes of an environment. `max_tokens`: of what follows a prompt; `max_length`: of all."""

    def __init__(
        self, pool: EnvironmentPool, encoder: TurnEncoder, *, max_turns: int, max_tokens: int, max_length: int
    ) -> None:
        self._pool, self._encoder = pool, encoder
        self._max_turns, self._max_tokens, self._max_length = max_turns, max_tokens, max_length

    def play(
        self,
        prompts: Sequence[TokenizedPrompt],
        seeds: Sequence[int],
        session: SamplingSession,
        on_step: Callable[[], None],
    ) -> list[Episode]:
        """An episode for each prompt. One in which the environment says what the template does not take ends with an error."""
        begun = self._pool.reset([{**prompt.columns, "prompt": prompt.prompt} for prompt in prompts])
        episodes = self._begin(prompts, begun)
        playing = [at for at, episode in enumerate(episodes) if not episode.error]
        for turn in range(self._max_turns):
            # Another seed for each turn; the first is that of a completion without an environment.
            requests = [
                SampleRequest(
                    at,
                    [*episodes[at].prompt_ids, *episodes[at].completion.tokens],
                    self._max_tokens - len(episodes[at].completion.tokens),
                    derive_key(seeds[at], "turn", turn) if turn else seeds[at],
                )
                for at in playing
            ]
            if not requests:
                break
            answers = self._add_answers(episodes, dict(zip(playing, sample_all(session, requests, on_step), strict=True)), turn)
            replies = self._pool.step(answers)
            playing = [at for at in playing if self._goes_on(episodes[at], replies[at], turn)]
        return episodes

    def _begin(self, prompts: Sequence[TokenizedPrompt], begun: Sequence[EpisodeReply]) -> list[Episode]:
        encoded: dict[str, list[int]] = {}
        episodes = []
        for prompt, reply in zip(prompts, begun, strict=True):
            # An episode that fails has the prompt of the data, and is left out.
            episode = Episode(prompt.tokens.tolist(), prompt.prompt, error=reply.error)  # type: ignore[arg-type]
            with self._ends_on_error(episode):
                if not reply.error:
                    episode = Episode(self._encode_first(reply.messages, encoded), reply.messages)
            episodes.append(episode)
        return episodes

    def _encode_first(self, messages: Sequence[Message], encoded: dict[str, list[int]]) -> list[int]:
        """The ids of first messages, which may be `encoded` already. Raises UserError."""
        if (key := json.dumps(messages)) not in encoded:
            encoded[key] = self._encoder.encode_prompt(self._bounded(messages))
        if len(encoded[key]) + self._max_tokens > self._max_length:
            raise UserError(f"its first messages are {len(encoded[key])} tokens, which leave no room for a completion")
        return encoded[key]

    def _bounded(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages. Raises UserError, before the template takes its time, for more than any sequence could hold."""
        size = sum(len(str(message.get("content"))) for message in messages)
        if size > self._max_length * self._encoder.max_token_bytes:
            raise UserError(f"said {size:,} characters, more than a sequence of {self._max_length:,} tokens can hold")
        return messages

    @staticmethod
    @contextmanager
    def _ends_on_error(episode: Episode) -> Iterator[None]:
        """What the environment said cannot be used: that is the end of the episode, and not of the run."""
        try:
            yield
        except UserError as problem:
            episode.error = str(problem)

    def _add_answers(
        self, episodes: Sequence[Episode], sampled: Mapping[int, SampledCompletion], turn: int
    ) -> dict[int, Message]:
        answers = {}
        for at, span in sampled.items():
            ended = span.stopped and span.tokens[-1] in self._encoder.turn_end_ids
            answers[at] = self._encoder.read_answer(span.tokens, turn, ended=ended)
            episodes[at].completion.extend(span)
            episodes[at].turns.append(answers[at])
        return answers

    def _goes_on(self, episode: Episode, reply: EpisodeReply, turn: int) -> bool:
        """Append a reply, if another answer follows it."""
        completion, answer = episode.completion, episode.turns[-1]
        episode.error = reply.error
        if reply.error or reply.done or turn + 1 == self._max_turns:
            return False
        if completion.tokens[-1] not in self._encoder.turn_end_ids or not completion.stopped:
            return False  # it was cut, or ended as no turn ends that others follow
        given = list[int]()
        with self._ends_on_error(episode):
            given = self._encoder.encode_reply(answer, self._bounded(reply.messages))
        if episode.error:
            return False
        if len(completion.tokens) + len(given) >= self._max_tokens:
            completion.stopped = False  # the end is missing
            return False
        completion.add_given(given)
        episode.turns += reply.messages
        return True

"""Episodes: completions of several turns, in which an environment answers what was sampled.

Where a sampling session needs its requests together, all episodes of a set take their turns
together: the answers of a turn are sampled, then the environment replies to each. Else each goes on
by itself. Ids are only appended. What an environment is, and its processes, are in
post/environments/.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from lmforge.core.data.order import derive_key
from lmforge.core.errors import UserError
from lmforge.core.files.untrusted import list_names, quoted
from lmforge.core.foreign_code import HEARTBEAT_CALL_SECONDS
from lmforge.post.environments.appending import TurnEncoder
from lmforge.post.environments.environment import Message
from lmforge.post.environments.process import EnvironmentPool, EpisodeReply
from lmforge.post.rl.sampler import SampledCompletion, SampleRequest, SamplingSession
from lmforge.text.chat.preferences import TokenizedPrompt


class Turns(NamedTuple):
    """An environment, and the encoders by which turns with it become ids: of several environments
    by their names, of one by the empty name.
    """

    pool: EnvironmentPool
    encoders: Mapping[str, TurnEncoder]

    def encoder(self, columns: Mapping[str, Any]) -> TurnEncoder:
        """The encoder of the environment that a row names in its column `environment`, where there
        are several. Raises UserError.
        """
        name = "" if "" in self.encoders else columns.get("environment")
        if not isinstance(name, str) or name not in self.encoders:
            expected = list_names(self.encoders)
            raise UserError(
                f"column environment: expected a name of {self.pool.spec} ({expected}), got"
                f" {quoted(name)}"
            )
        return self.encoders[name]

    @property
    def stop_token_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return frozenset[int]().union(
            *(encoder.stop_token_ids for encoder in self.encoders.values())
        )


@dataclass
class Episode:
    """A prompt, and what came after it: ids, and the same as messages.

    `error`: why the environment failed, if it did.
    """

    encoder: TurnEncoder
    prompt_ids: list[int]
    messages: Sequence[Message]
    completion: SampledCompletion = field(default_factory=SampledCompletion)
    turns: list[Message] = field(default_factory=list)
    failed_calls: int = 0
    error: str = ""

    def counts(self) -> dict[str, int]:
        """Metrics: answers, their calls of tools, and how many of these failed."""
        answers = [turn for turn in self.turns if turn["role"] == "assistant"]
        num_calls = sum(len(answer.get("tool_calls", ())) for answer in answers)
        return {
            "turns": len(answers),
            "tool_calls": num_calls,
            "failed_tool_calls": self.failed_calls,
        }

    def describe(self) -> str:
        """The turns as text."""
        lines = []
        for message in self.turns:
            calls = [
                json.dumps(call["function"], ensure_ascii=False)
                for call in message.get("tool_calls", ())
            ]
            lines.append(
                f"{message['role']}: " + "\n".join(filter(None, [message["content"], *calls]))
            )
        return "\n".join(lines)


class EpisodePlayer:
    """Plays episodes of an environment.

    `max_tokens`: of what follows a prompt; `max_length`: of all.
    """

    def __init__(self, turns: Turns, *, max_turns: int, max_tokens: int, max_length: int) -> None:
        self._turns = turns
        self._pool = turns.pool
        self._max_turns = max_turns
        self._max_tokens = max_tokens
        self._max_length = max_length

    def play(
        self,
        prompts: Sequence[TokenizedPrompt],
        seeds: Sequence[int],
        session: SamplingSession,
        on_step: Callable[[], None],
    ) -> list[Episode]:
        """An episode for each prompt.

        One in which the environment says what the template does not take ends with an error.
        """
        begun = self._pool.reset(
            [{**prompt.columns, "prompt": prompt.prompt} for prompt in prompts]
        )
        episodes = self._begin(prompts, begun)
        turn_of = {at: 0 for at, episode in enumerate(episodes) if not episode.error}
        answered: dict[int, Message] = {}
        replies: dict[int, Future[dict[str, Any]]] = {}
        for at in turn_of:
            session.add(self._request(episodes[at], at, seeds[at], 0))
        try:
            while session.num_unfinished or replies:
                for request, span in session.step() if session.num_unfinished else ():
                    at = request.key
                    answered[at] = self._add_answer(episodes[at], span, turn_of[at])
                on_step()
                if not (session.in_order and session.num_unfinished):
                    new_replies = self._pool.begin_steps(
                        {at: answered.pop(at) for at in sorted(answered)}
                    )
                    replies |= new_replies
                    for reply in new_replies.values():
                        reply.add_done_callback(lambda _: session.wake())
                for at in self._arrived(replies, session):
                    if self._goes_on(
                        episodes[at], self._pool.take_reply(at, replies.pop(at)), turn_of[at]
                    ):
                        turn_of[at] += 1
                        session.add(self._request(episodes[at], at, seeds[at], turn_of[at]))
        finally:
            for reply in replies.values():
                reply.cancel()
        return episodes

    def _request(self, episode: Episode, at: int, seed: int, turn: int) -> SampleRequest:
        """The request for an answer.

        Another seed for each turn; the first is that of a completion without an environment.
        """
        done = episode.completion.tokens
        seed = derive_key(seed, "turn", turn) if turn else seed
        return SampleRequest(at, [*episode.prompt_ids, *done], self._max_tokens - len(done), seed)

    def _arrived(
        self, replies: Mapping[int, Future[dict[str, Any]]], session: SamplingSession
    ) -> list[int]:
        """The episodes whose replies have come, in their order, after a moment where nothing is
        sampled: all of them, where the session needs its requests together.
        """
        if session.num_unfinished:
            return [at for at, reply in sorted(replies.items()) if reply.done()]
        self._pool.heartbeat()
        done, pending = wait(
            replies.values(),
            HEARTBEAT_CALL_SECONDS,
            FIRST_EXCEPTION if session.in_order else FIRST_COMPLETED,
        )
        holds_back = session.in_order and pending and not any(reply.exception() for reply in done)
        return [] if holds_back else [at for at, reply in sorted(replies.items()) if reply in done]

    def _begin(
        self, prompts: Sequence[TokenizedPrompt], begun: Sequence[EpisodeReply]
    ) -> list[Episode]:
        encoded: dict[tuple[TurnEncoder, str], list[int]] = {}
        episodes = []
        for prompt, reply in zip(prompts, begun, strict=True):
            # An episode that fails has the prompt of the data, and is left out.
            encoder = self._turns.encoder(prompt.columns)
            episode = Episode(encoder, prompt.tokens.tolist(), prompt.prompt, error=reply.error)  # type: ignore[arg-type]
            with self._ends_on_error(episode):
                if not reply.error:
                    episode = Episode(
                        encoder,
                        self._encode_first(encoder, reply.messages, encoded),
                        reply.messages,
                    )
            episodes.append(episode)
        return episodes

    def _encode_first(
        self,
        encoder: TurnEncoder,
        messages: Sequence[Message],
        encoded: dict[tuple[TurnEncoder, str], list[int]],
    ) -> list[int]:
        """The ids of first messages, which may be `encoded` already. Raises UserError."""
        if (key := (encoder, json.dumps(messages))) not in encoded:
            encoded[key] = encoder.encode_prompt(self._bounded(encoder, messages))
        if len(encoded[key]) + self._max_tokens > self._max_length:
            raise UserError(
                f"its first messages are {len(encoded[key])} tokens, which leave no room for a"
                " completion"
            )
        return encoded[key]

    def _bounded(self, encoder: TurnEncoder, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages.

        Raises UserError, before the template takes its time, for more than any sequence could hold.
        """
        size = sum(len(str(message.get("content"))) for message in messages)
        if size > self._max_length * encoder.max_token_bytes:
            raise UserError(
                f"said {size:,} characters, more than a sequence of {self._max_length:,} tokens can"
                " hold"
            )
        return messages

    @staticmethod
    @contextmanager
    def _ends_on_error(episode: Episode) -> Iterator[None]:
        """A context in which a UserError, since what the environment said cannot be used, ends the
        episode and not the run.
        """
        try:
            yield
        except UserError as problem:
            episode.error = str(problem)

    def _add_answer(self, episode: Episode, span: SampledCompletion, turn: int) -> Message:
        ended = span.stopped and span.tokens[-1] in episode.encoder.turn_end_ids
        answer = episode.encoder.read_answer(span.tokens, turn, ended=ended)
        episode.completion.extend(span)
        episode.turns.append(answer)
        return answer

    def _goes_on(self, episode: Episode, reply: EpisodeReply, turn: int) -> bool:
        """Append a reply, if another answer follows it."""
        completion = episode.completion
        answer = episode.turns[-1]
        encoder = episode.encoder
        episode.error = reply.error
        episode.failed_calls += reply.failed_calls
        if reply.error or reply.done or turn + 1 == self._max_turns:
            return False
        if completion.tokens[-1] not in encoder.turn_end_ids or not completion.stopped:
            return False  # it was cut, or ended as no turn ends that others follow
        given = list[int]()
        with self._ends_on_error(episode):
            given = encoder.encode_reply(answer, self._bounded(encoder, reply.messages))
        if episode.error:
            return False
        if len(completion.tokens) + len(given) >= self._max_tokens:
            completion.stopped = False  # the end is missing
            return False
        completion.add_given(given)
        episode.turns += reply.messages
        return True

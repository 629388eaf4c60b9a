"""`EncoderCache`: decides which images a step encodes, and which ones it drops to make room.

An image's rows replace the embeddings of its placeholder tokens, so a chunk may contain tokens of an image only if the
runner has its rows. A chunk ends before an image that must wait for space or time. The least recently used rows are
dropped first, but never rows that a running sequence needs for its next tokens. In a step, no image overtakes one that
waits, and a sequence whose images fill the cache advances, so no image waits forever.

A step always encodes its first image. If the step has a time limit, further images use time that prompts would get.
"""

from collections import OrderedDict
from collections.abc import Iterable

from octavo_engine.core.prompt_shares import PromptShares
from octavo_engine.core.sequence import Sequence
from octavo_engine.settings.records import SchedulerConfig
from octavo_engine.wire.plan import StepCosts, StepPlan
from octavo_engine.wire.records import ImageSpan


class EncoderCache:
    """The images whose rows the runner has once all issued plans have run, in order from least to most recently used.

    A digest names an image's rows; it depends on the request's salt.

    `size` and `num_tokens` are in tokens; some images have a few more tokens than rows.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.size = config.max_num_batched_tokens
        self.num_tokens = self.num_encoded = 0
        self._is_chunked = config.enable_chunked_prefill  # else a prompt needs all its images at once
        self._lengths: OrderedDict[bytes, int] = OrderedDict()
        self._dropped: list[bytes] = []  # the next plan lists them
        self._plan = StepPlan(step_id=-1)
        self._costs = StepCosts()
        self._used: set[bytes] = set()  # by this step
        self._makes_wait = False  # an image waits already in this step

    @property
    def usage(self) -> float:
        return self.num_tokens / self.size

    def make_fit(self, images: Iterable[ImageSpan]) -> None:
        """Grow to the size of the largest image of all requests so far."""
        self.size = max([self.size, *(image.length for image in images)])

    def begin_step(self, plan: StepPlan, costs: StepCosts) -> None:
        self._plan, self._costs, self._makes_wait = plan, costs, False
        self._used.clear()
        plan.dropped_images, self._dropped = self._dropped, []

    def encode(
        self, seq: Sequence, want: int, running: list[Sequence], *, is_limited: bool, shares: PromptShares | None
    ) -> int:
        """Plan the encoding of images; return how many of the next `want` tokens come before an image that must wait.

        `is_limited`: the step has a time limit. `shares`: those of the step's prompts; None until decodes are planned.
        """
        first, end = seq.computed, seq.computed + want
        needed = [
            (index, image)
            for index, image in enumerate(seq.group.request.images)
            if image.start < end and first < image.end
        ]
        for part in [[each] for each in needed] if self._is_chunked else [needed]:
            absent = {key: index for index, image in part if (key := image.digest) not in self._lengths}
            num_tokens = sum([seq.group.request.images[index].length for index in absent.values()])
            self._used.update(image.digest for _, image in part)
            if absent and not (self._has_time(num_tokens, is_limited, shares) and self._make_room(num_tokens, running)):
                self._makes_wait = True
                return max(part[0][1].start - first, 0) if self._is_chunked else 0
            for key, index in absent.items():
                self._lengths[key] = seq.group.request.images[index].length
                self._plan.encode.append((seq.seq_id, index))
            self.num_tokens += num_tokens
            self.num_encoded += len(absent)
            for _, image in part:
                self._lengths.move_to_end(image.digest)
        return want

    def lacks_next(self, seq: Sequence) -> bool:
        """Return whether the next token of a sequence belongs to an image that has no rows."""
        images = [image for image in seq.group.request.images if image.start <= seq.computed < image.end]
        return any(image.digest not in self._lengths for image in images)

    def forget(self, seq: Sequence) -> None:
        """Drop the rows of a failed sequence's images, because the runner may not have them."""
        for key in {image.digest for image in seq.group.request.images}.intersection(self._lengths):
            self._drop(key, self._dropped)

    def forget_all(self, plans: Iterable[StepPlan] = ()) -> None:
        """Drop all images; list again those that failed `plans` should have dropped."""
        self._dropped += [key for plan in plans for key in plan.dropped_images]
        for key in [*self._lengths]:
            self._drop(key, self._dropped)

    def check(self) -> None:
        assert self.num_tokens == sum(self._lengths.values()) <= self.size

    def _has_time(self, num_tokens: int, is_limited: bool, shares: PromptShares | None) -> bool:
        if self._makes_wait:
            return False
        if not (self._plan.encode and is_limited):
            return True
        seconds = num_tokens * self._costs.image_token_s
        return seconds > 0 and shares is not None and shares.take(seconds)

    def _make_room(self, num_tokens: int, running: list[Sequence]) -> bool:
        """Drop images until `num_tokens` more fit; return False, and drop none, if that is impossible."""
        lacking = self.num_tokens + num_tokens - self.size
        if lacking <= 0:
            return True
        kept, victims = self._used | self._needed_next(running), list[bytes]()
        for key, length in self._lengths.items():
            if lacking > 0 and key not in kept:
                victims.append(key)
                lacking -= length
        if lacking > 0:
            return False
        for key in victims:
            self._drop(key, self._plan.dropped_images)
        return True

    def _needed_next(self, running: list[Sequence]) -> set[bytes]:
        """Return each sequence's images from its next token up to the first image without rows.

        Later images are not kept, because a sequence must not occupy the space for which it waits itself. Without
        chunked prefill, no image is kept.
        """
        found = set[bytes]()
        for seq in running if self._is_chunked else ():
            for image in seq.group.request.images:
                if seq.computed < image.end:
                    key = image.digest
                    if key not in self._lengths:
                        break
                    found.add(key)
        return found

    def _drop(self, key: bytes, dropped: list[bytes]) -> None:
        self.num_tokens -= self._lengths.pop(key)
        dropped.append(key)

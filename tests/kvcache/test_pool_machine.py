"""Random lives of requests over one pool, against a fake KV memory and plain reference counts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from smpart.kvcache import BlockPool, BlockTable, HashChain, OutOfBlocks, block_hashes

BLOCKS = 12
BLOCK = 2
PROMPTS = st.lists(st.integers(0, 1), min_size=3, max_size=11)
SALTS = st.sampled_from(["", "", "b"])

Content = tuple[str, tuple[int, ...]]
"""What a block's memory means: the salt, and every token up to the block's end."""


@dataclass
class Request:
    """A request with known tokens, of which the first `written` have their KV in memory."""

    salt: str
    tokens: list[int]
    table: BlockTable
    chain: HashChain
    written: int = 0
    admitted: bool = False

    def content(self, index: int) -> Content:
        return self.salt, tuple(self.tokens[: (index + 1) * BLOCK])


@dataclass
class Load:
    """Blocks pinned on behalf of something that outlives the request."""

    ids: list[int]
    contents: list[Content]
    keys: list[bytes]
    written: int


@dataclass
class PoolMachine(RuleBasedStateMachine):
    """The oracle is the memory: whoever finds a block must find his own prefix in it, whatever happened in between."""

    pool: BlockPool = field(default_factory=lambda: BlockPool(BLOCKS, BLOCK))
    memory: dict[int, Content] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    parents: dict[bytes, bytes | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __hash__(self) -> int:
        return id(self)

    @initialize(prompts=st.lists(PROMPTS, min_size=2, max_size=5))
    def begin(self, prompts: list[list[int]]) -> None:
        for tokens in prompts:
            self.live(tokens, "")

    @rule(tokens=PROMPTS, salt=SALTS)
    def live(self, tokens: list[int], salt: str) -> None:
        """A whole life: what it leaves behind is the cache that others hit and evict."""
        request = self.new(tokens, salt)
        self.take(request)
        self.write(request, len(tokens), publish=True)
        request.table.release()
        self.requests.remove(request)

    @precondition(lambda self: len(self.requests) < 5)
    @rule(tokens=PROMPTS, salt=SALTS, first=st.integers(0, 9))
    def start(self, tokens: list[int], salt: str, first: int) -> None:
        request = self.new(tokens, salt)
        self.take(request)
        self.write(request, min(request.written + first, len(tokens)), publish=True)

    @precondition(lambda self: any(not r.admitted for r in self.requests))
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        self.take(data.draw(st.sampled_from([r for r in self.requests if not r.admitted])))

    def new(self, tokens: list[int], salt: str) -> Request:
        chain = HashChain(BLOCK, salt)
        chain.extend(tokens)
        self.requests.append(Request(salt, list(tokens), BlockTable(self.pool), chain))
        return self.requests[-1]

    def take(self, request: Request) -> None:
        """Admit: reuse what is found, and see that it is what was looked for."""
        reusable = request.chain.hashes[: (len(request.tokens) - 1) // BLOCK]
        before = self.state()
        matched = self.pool.match(reusable)
        assert self.state() == before
        found = self.pool.acquire(reusable)
        assert len(found) == matched
        assert [self.memory[b] for b in found] == [request.content(i) for i in range(matched)]
        request.table.adopt(found)
        request.written = request.table.capacity
        request.admitted = True

    @precondition(lambda self: any(r.admitted for r in self.requests))
    @rule(data=st.data(), chunk=st.integers(1, 5), publish=st.booleans())
    def compute(self, data: st.DataObject, chunk: int, publish: bool) -> None:
        request = data.draw(st.sampled_from([r for r in self.requests if r.admitted]))
        if request.written == len(request.tokens):
            request.tokens.append(data.draw(st.integers(0, 1)))
            request.chain.extend(request.tokens[-1:])
        self.write(request, min(request.written + chunk, len(request.tokens)), publish)

    def write(self, request: Request, end: int, publish: bool) -> None:
        """Compute up to `end` tokens if there are blocks for them; nothing may change if not."""
        before, table_before = self.state(), list(request.table.ids)
        room, missing = self.pool.free, request.table.missing(end)
        try:
            added = request.table.ensure(end)
        except OutOfBlocks:
            assert missing > room
            assert self.state() == before and request.table.ids == table_before
            return
        assert missing == len(added) <= room
        assert added == sorted(added)
        for index in range(request.written // BLOCK, end // BLOCK):
            self.memory[request.table.ids[index]] = request.content(index)
        request.written = end
        if publish:
            request.table.publish_upto(end, request.chain.hashes)
            for parent, key in zip([None, *request.chain.hashes], request.chain.hashes, strict=False):
                self.parents[key] = parent

    @precondition(lambda self: bool(self.requests))
    @rule(data=st.data(), back=st.booleans())
    def give_up(self, data: st.DataObject, back: bool) -> None:
        """Finish, cancel, or (`back`) preempt: at any moment."""
        request = data.draw(st.sampled_from(self.requests))
        request.table.release()
        if back:
            request.admitted, request.written = False, 0
        else:
            self.requests.remove(request)

    @precondition(lambda self: len(self.requests) < 5)
    @rule(tokens=PROMPTS, more=PROMPTS)
    def race(self, tokens: list[int], more: list[int]) -> None:
        """Two requests compute the same prefix at once: twins."""
        pair = [self.new(tokens, ""), self.new(tokens + more, "")]
        for request in pair:
            self.take(request)
        for request in pair:
            self.write(request, len(request.tokens), publish=True)
        pair[0].table.release()
        self.requests.remove(pair[0])

    @precondition(lambda self: len(self.loads) < 2)
    @rule(tokens=PROMPTS)
    def load(self, tokens: list[int]) -> None:
        """Blocks are being written asynchronously when their request is cancelled."""
        request = self.new(tokens, "")
        self.take(request)
        if request.table.missing(len(tokens)) <= self.pool.free:
            request.table.ensure(len(tokens))
            self.pin(request, len(request.table.ids))
        request.table.release()
        self.requests.remove(request)

    @precondition(lambda self: len(self.loads) < 3 and any(r.table.ids for r in self.requests))
    @rule(data=st.data())
    def offload(self, data: st.DataObject) -> None:
        """Somebody reads leading blocks of a living request."""
        request = data.draw(st.sampled_from([r for r in self.requests if r.table.ids]))
        self.pin(request, data.draw(st.integers(1, len(request.table.ids))))

    @precondition(lambda self: len(self.loads) < 3)
    @rule(tokens=PROMPTS)
    def demote(self, tokens: list[int]) -> None:
        """Somebody reads a prefix that may be cached only."""
        request = self.new(tokens, "")
        self.requests.remove(request)
        ids = [b for key in request.chain.hashes[: self.pool.match(request.chain.hashes)] for b in self.peek(key)]
        self.pool.pin(ids)
        contents = [request.content(i) for i in range(len(ids))]
        self.loads.append(Load(ids, contents, request.chain.hashes[: len(ids)], len(ids)))

    def pin(self, request: Request, count: int) -> None:
        ids = request.table.ids[:count]
        complete = min(len(request.tokens) // BLOCK, count)
        written = min(request.written // BLOCK, count)
        contents = [request.content(i) for i in range(complete)]
        self.pool.pin(ids)
        self.loads.append(Load(list(ids), contents, request.chain.hashes[:complete], written))

    @precondition(lambda self: bool(self.loads))
    @rule(data=st.data(), landed=st.booleans())
    def unpin(self, data: st.DataObject, landed: bool) -> None:
        load = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        assert [self.memory[b] for b in load.ids[: load.written]] == load.contents[: load.written], "overwritten"
        if landed:
            for parent, block, key, content in zip(
                [None, *load.keys], load.ids, load.keys, load.contents, strict=False
            ):
                self.memory[block] = content
                self.pool.publish(block, key)
                self.parents[key] = parent
        self.pool.unpin(load.ids)

    @rule(sure=st.integers(0, 15))
    def clear(self, sure: int) -> None:
        if sure == 7:
            self.pool.clear_cached()

    def state(self) -> tuple[object, ...]:
        """All that can be seen from outside."""
        found = frozenset(k for k in self.parents if self.pool.match([k]))
        return self.pool.free, self.pool.owned, self.pool.cached, self.pool.evictions, found

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.pool.check()
        holders = Counter(b for r in self.requests for b in r.table.ids)
        pinned = {b for load in self.loads for b in load.ids}
        findable = {b for k in self.parents for b in self.peek(k)}
        owned = set(holders) | (pinned - findable)
        cached = findable - owned
        assert self.pool.owned == len(owned)
        assert self.pool.cached == len(cached)
        assert self.pool.free == BLOCKS - len(owned) - len(cached & pinned)

    @invariant()
    def written_blocks_keep_their_content(self) -> None:
        for request in self.requests:
            for index in range(request.written // BLOCK):
                assert self.memory[request.table.ids[index]] == request.content(index)

    @invariant()
    def no_evictable_block_is_lost_with_its_parent(self) -> None:
        held = {b for r in self.requests for b in r.table.ids} | {b for load in self.loads for b in load.ids}
        for key, parent in self.parents.items():
            if parent is not None and any(b not in held for b in self.peek(key)):
                assert self.pool.match([parent]) == 1

    def peek(self, key: bytes) -> list[int]:
        """The block found under a key, seen through the private index: acquiring it would change the order."""
        block = self.pool._found.get(key)
        return [] if block is None else [block]

    def teardown(self) -> None:
        for request in self.requests:
            request.table.release()
        for load in self.loads:
            self.pool.unpin(load.ids)
        self.pool.clear_cached()
        self.pool.check()
        assert (self.pool.free, self.pool.owned, self.pool.cached) == (BLOCKS, 0, 0), "blocks leaked"


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=80, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=8),
    wanted=st.integers(1, 40),
)
def test_eviction_order_is_that_of_a_naive_lru_with_leaves_first(prompts: list[list[int]], wanted: int) -> None:
    pool = BlockPool(40, block_tokens=1)
    last_use: dict[tuple[int, ...], int] = {}
    for now, prompt in enumerate(prompts):
        hashes = block_hashes(prompt, 1)
        table = BlockTable(pool)
        table.adopt(pool.acquire(hashes))
        table.ensure(len(prompt))
        table.publish_upto(len(prompt), hashes)
        table.release()
        last_use |= {tuple(prompt[: n + 1]): now for n in range(len(prompt))}
    order = sorted(last_use, key=lambda prefix: (last_use[prefix], -len(prefix)))
    evicted = max(wanted - (pool.blocks - len(order)), 0)
    pool.allocate(wanted)
    assert pool.evictions == evicted
    for prefix in order:
        assert (pool.match(block_hashes(prefix, 1)) == len(prefix)) == (prefix in order[evicted:])

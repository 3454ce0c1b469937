"""What a tenant has, nobody else learns of."""

import threading

import pytest

from jaxlora.serve.registry import NotFound, Registry, Taken


@pytest.fixture
def registry(database, clock):
    return Registry(database, clock=clock)


def test_an_entry_has_what_it_was_given(registry, clock):
    session = registry.add("session", "alice", tags=["a"], user=None)
    assert len(session) == 32
    model = registry.add("model", "alice", f"{session}:train:0", parent=session, rank=8)
    entry = registry.owned("alice", "model", model)
    assert (entry.parent, entry.fields, entry.created_at) == (
        session,
        {"rank": 8},
        clock.now,
    )
    assert registry.owned("alice", "session", session).fields == {
        "tags": ["a"],
        "user": None,
    }


def test_others_things_are_missing_in_the_same_words(registry):
    own = registry.add("session", "alice")
    texts = []
    for change in (
        lambda who: registry.owned(who, "session", own),
        lambda who: registry.update(who, "session", own, a=1),
        lambda who: registry.touch(who, "session", own),
        lambda who: registry.delete(who, "session", own),
    ):
        with pytest.raises(NotFound) as found:
            change("bob")
        texts.append(str(found.value))
    registry.delete("alice", "session", own)
    with pytest.raises(NotFound) as found:
        registry.owned("bob", "session", own)
    assert {*texts} == {str(found.value)}
    assert registry.list("bob", "session") == []


@pytest.mark.parametrize("id", ["", "\0", "\ud800", "x" * 10_000, "' OR 1=1 --"])
def test_ids_that_cannot_be(registry, id):
    with pytest.raises(NotFound):
        registry.owned("alice", "model", id)


def test_a_public_checkpoint_is_read_by_all_and_changed_by_its_tenant(registry):
    id = registry.add("checkpoint", "alice", "m/weights/a", num_bytes=10)
    registry.update("alice", "checkpoint", id, is_public=True)
    assert registry.owned("bob", "checkpoint", id, or_public=True).tenant == "alice"
    with pytest.raises(NotFound):
        registry.owned("bob", "checkpoint", id)
    with pytest.raises(NotFound):
        registry.delete("bob", "checkpoint", id)
    assert registry.list("bob", "checkpoint") == []


def test_an_id_is_given_once(registry):
    registry.add("model", "alice", "s:train:0")
    registry.add("checkpoint", "alice", "s:train:0")  # of another kind
    for tenant in ("alice", "bob"):
        with pytest.raises(Taken, match="there is a model 's:train:0' already"):
            registry.add("model", tenant, "s:train:0")


def test_lists_are_of_a_tenant_or_a_parent_and_have_parts(registry, clock):
    for number in range(5):
        clock.now += 1
        registry.add("model", "alice", f"a{number}", parent=f"s{number % 2}")
    registry.add("model", "bob", "b0")
    ids = lambda **options: [e.id for e in registry.list("alice", "model", **options)]
    assert ids() == ["a4", "a3", "a2", "a1", "a0"]
    assert ids(limit=2, offset=1) == ["a3", "a2"]
    assert ids(parent="s1") == ["a3", "a1"]
    assert registry.count("alice", "model") == 5
    assert registry.count(None, "model") == len(registry.list(None, "model")) == 6
    assert registry.count("alice", "model", parent="s0") == 3


def test_changes_of_several_threads_are_all_kept(registry):
    id = registry.add("job", "alice")

    def change(name: str) -> None:
        for number in range(20):
            registry.update("alice", "job", id, **{name: number})

    threads = [threading.Thread(target=change, args=(n,)) for n in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.owned("alice", "job", id).fields == {"a": 19, "b": 19, "c": 19}


def test_what_is_over_and_what_is_not_in_use(registry, clock):
    registry.add("checkpoint", "alice", "short", expires_in=60, num_bytes=3)
    registry.add("checkpoint", "alice", "long", num_bytes=4)
    registry.add("session", "alice", "quiet")
    registry.add("session", "bob", "busy")
    assert registry.stored_bytes("alice") == 7 and registry.stored_bytes("bob") == 0
    clock.now += 300
    registry.touch("bob", "session", "busy")
    assert [entry.id for entry in registry.expired("checkpoint")] == ["short"]
    assert [entry.id for entry in registry.lapsed("session", 300, 90)] == ["quiet"]
    clock.now += 90
    assert [entry.id for entry in registry.lapsed("session", 300, 90)] == []
    registry.update("alice", "checkpoint", "short", expires_at=None)
    assert registry.expired("checkpoint") == []


def test_clients_that_came_and_went_leave_what_they_have_saved(registry, clock):
    for number in range(50):
        registry.add("session", "alice", f"s{number}")
        model = f"s{number}:m"
        registry.add("model", "alice", model, parent=f"s{number}")
        registry.add("sampler", "alice", f"s{number}:s", parent=f"s{number}")
        if number == 7:
            registry.add("checkpoint", "alice", f"{model}/weights/a", parent=model)
    ids = lambda kind: {entry.id for entry in registry.list("alice", kind)}
    clock.now += 100
    registry.touch("alice", "session", "s1")  # it has a heartbeat
    registry.touch("alice", "model", "s2:m")  # they are used without one
    registry.note_use(registry.owned("alice", "sampler", "s3:s"))
    unused = registry.unused_models(100)
    assert {entry.id for entry in unused} == ids("model") - {"s1:m", "s2:m"}
    registry.delete_unused(100)  # the models are not unloaded yet
    assert len(ids("model")) == len(ids("session")) == 50
    assert ids("sampler") == {"s1:s", "s3:s"}
    for entry in unused:
        registry.update("alice", "model", entry.id, unloaded=True)
    assert registry.unused_models(100) == []
    registry.delete_unused(100)
    assert ids("model") == {"s1:m", "s2:m", "s7:m"}
    assert ids("session") == {"s1", "s2", "s3", "s7"}
    registry.delete("alice", "checkpoint", "s7:m/weights/a")
    clock.now += 100
    registry.delete_unused(100)
    assert ids("model") == {"s1:m", "s2:m"} and ids("session") == {"s1", "s2"}
    assert ids("sampler") == set()

"""Random schemas, with their columns in random order, and observations that fit them."""

import numpy as np

from zapex import Column, Schema

DTYPES = ("u1", "i1", "i2", "i8", "u4", "f2", "f4", "f8", "?", ">i2", "c8")
NUMBER = "row"  # an extra column that every schema has: which transition this is


def random_column(rng, stack=1):
    shape = tuple(rng.integers(1, 4, rng.integers(0, 3)).tolist())
    return Column(shape, DTYPES[rng.integers(len(DTYPES))], stack, int(rng.integers(-1, 1)))


def random_schema(rng, n_step=None):
    """One observation column or several, an action, some extra columns; and NUMBER."""
    names = rng.permutation(["right", "left", "up", "a"])[: rng.integers(1, 4)]
    columns = {f"obs/{name}": random_column(rng, int(rng.integers(1, 5))) for name in names}
    if rng.random() < 0.4:
        columns = {"obs": random_column(rng, int(rng.integers(1, 5)))}
    columns["action"] = random_column(rng)
    for name in rng.permutation(["a_mask", "mask", "zeta"])[: rng.integers(0, 4)]:
        columns[str(name)] = random_column(rng)
    columns[NUMBER] = Column((), np.int64)
    order = rng.permutation(list(columns)).tolist()
    n_step = n_step or int(rng.integers(1, 6))
    return Schema({name: columns[name] for name in order}, n_step, gamma=0.9)


def shuffled(rng, schema):
    """The same columns in another order."""
    order = rng.permutation(list(schema.columns)).tolist()
    columns = {name: schema.columns[name] for name in order}
    return Schema(columns, schema.n_step, schema.gamma)


def values(rng, column, shape):
    """Random values of a column; all of them equal themselves."""
    return rng.integers(0, 100, shape).astype(column.dtype)


def as_given(columns):
    """Observation columns as a user gives them: an array, or a dict by name."""
    if "obs" in columns:
        return columns["obs"]
    return {name.removeprefix("obs/"): array for name, array in columns.items()}


def steps_of(rng, schema, rows, first):
    """Actions and extra columns of `rows` transitions, numbered from `first`."""
    steps = {n: values(rng, c, (rows, *c.shape)) for n, c in schema.step_columns.items()}
    return {**steps, NUMBER: np.arange(first, first + rows)}


def random_rows(rng, schema, rows, first=0):
    """Whole transitions that share nothing, with the keywords of `extend`."""
    obs, next_obs = (
        {n: values(rng, c, (rows, *c.value_shape)) for n, c in schema.obs_columns.items()}
        for _ in range(2)
    )
    return {
        "obs": as_given(obs), "next_obs": as_given(next_obs), **steps_of(rng, schema, rows, first),
        "reward": rng.normal(size=rows).astype(np.float32), "terminated": rng.random(rows) < 0.2,
    }  # fmt: skip


def check_rows(batch, rows):
    """A batch is these rows, in any order, each once."""
    numbers = np.argsort(batch[NUMBER])
    np.testing.assert_array_equal(batch[NUMBER][numbers], rows[NUMBER])
    for name, given in rows.items():
        if name in ("terminated", "priorities"):
            continue
        several = isinstance(given, dict)
        for key, theirs in given.items() if several else [("", given)]:
            mine = batch[name][key] if several else batch[name]
            assert mine.dtype == theirs.dtype or name == NUMBER
            np.testing.assert_array_equal(mine[numbers], theirs, err_msg=name)
    np.testing.assert_array_equal(batch.discount[numbers] == 0.0, rows["terminated"])

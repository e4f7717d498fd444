"""What torch asks of every op: schema, fake kernel, torch.compile, no gradient; and capture in a CUDA graph."""

import inspect

import pytest
import torch
from oracles import make_history
from torch.autograd import forward_ad

from secureafl_ext import ops

OPS = ["median", "trimmed_mean", "lipschitz", "estimate", "aggregate"]


def sample(name, random, device):
    """Arguments of one call."""
    history = make_history(random, 6, 2, 40, dtype=torch.float32).to(device)
    flag = torch.tensor([True, False, True, True, True, True], device=device)
    a, b, c, d = history.last_updates[:4]
    return {
        "median": (history.last_updates, flag),
        "trimmed_mean": (history.last_updates, 1, flag),
        "lipschitz": (a, b, c, d),
        "estimate": (*history.tensors(), 0.7),
        "aggregate": (history.model, a, 2, flag[0], *history.rest(), flag, 0.7, "trimmed_mean", 1),
    }[name]


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name, random, device):
    op = getattr(torch.ops.secureafl, name).default
    assert set(torch.library.opcheck(op, sample(name, random, device)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("name", OPS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler itself
def test_compiles_without_a_graph_break(name, random, device):
    op, arguments = getattr(ops, name), sample(name, random, device)
    torch.compiler.reset()  # each op is a first compilation, not one more recompilation of the same lambda
    compiled = torch.compile(lambda *arguments: 2 * op(*arguments), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*arguments), 2 * op(*arguments))


@pytest.mark.parametrize("name", OPS)
def test_fake_kernel_gives_shape_dtype_and_device(name, random, device):
    arguments = sample(name, random, device)
    real = getattr(ops, name)(*arguments)
    mode = torch._subclasses.FakeTensorMode()
    fakes = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in arguments]
    with mode:
        fake = getattr(ops, name)(*fakes)
    assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)


@pytest.mark.parametrize("name", OPS)
def test_a_gradient_is_refused_in_words(name, random, device):
    first, *rest = sample(name, random, device)
    result = getattr(ops, name)(first.requires_grad_(), *rest)
    with pytest.raises(NotImplementedError, match=f"secureafl::{name} offers no gradient; call it under torch.no_grad"):
        result.sum().backward()


@pytest.mark.parametrize("name", OPS)
def test_defaults_are_those_of_the_schema(name):
    """The wrappers and torch.ops must not drift apart."""
    schema = getattr(torch.ops.secureafl, name).default._schema
    wrapper = inspect.signature(getattr(ops, name)).parameters.values()
    assert [p.name for p in wrapper] == [a.name for a in schema.arguments]
    for parameter, argument in zip(wrapper, schema.arguments, strict=True):
        assert argument.has_default_value() == (parameter.default is not parameter.empty)
        assert not argument.has_default_value() or argument.default_value == parameter.default


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("name", OPS)
def test_captured_in_a_cuda_graph(name, random):
    op, arguments = getattr(ops, name), sample(name, random, "cuda")
    op(*arguments)  # loads the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = op(*arguments)
    for factor in (1.0, -2.0):
        arguments[0].mul_(factor)  # a replay must see the new values
        graph.replay()
        assert torch.equal(result, op(*arguments))


def placeholder(argument, device):
    """A value of the type that the schema names."""
    values = {"int": 0, "float": 0.0, "bool": False, "str": "median"}
    return values.get(str(argument.type)) if "Tensor" not in str(argument.type) else torch.zeros(2, 2, device=device)


@pytest.mark.parametrize("name", [name for name in torch._C._dispatch_get_all_op_names() if "secureafl::" in name])
def test_a_tensor_without_values_among_others_is_refused(name):
    """torch would run the fake kernel on the others: a result without values, or a state that nothing has changed."""
    op = getattr(torch.ops.secureafl, name.removeprefix("secureafl::")).default
    tensors = [k for k, argument in enumerate(op._schema.arguments) if "Tensor" in str(argument.type)]
    for k in tensors[1:]:
        arguments = [placeholder(one, "meta" if here == k else "cpu") for here, one in enumerate(op._schema.arguments)]
        with pytest.raises(RuntimeError) as refusal:
            op(*arguments)
        wrong, first = op._schema.arguments[k].name, op._schema.arguments[0].name
        assert str(refusal.value) == f"{name}: {wrong} must be on cpu like {first}, got meta"


def test_a_keyword_without_values_is_refused_too():
    with pytest.raises(RuntimeError, match="secureafl::median: mask must be on cpu like updates, got meta"):
        torch.ops.secureafl.median(torch.ones(3, 2), mask=torch.ones(3, dtype=torch.bool, device="meta"))


@pytest.mark.parametrize("name", OPS)
@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")  # torch's own, at the first jvp
def test_a_forward_derivative_is_refused_in_words(name, random, device):
    op, (first, *rest) = getattr(torch.ops.secureafl, name), sample(name, random, device)
    words = f"secureafl::{name} offers no forward-mode derivative; call it with plain tensors"
    with pytest.raises(NotImplementedError, match=words):
        torch.func.jvp(lambda first: op(first, *rest), (first,), (first,))
    with forward_ad.dual_level():
        with pytest.raises(NotImplementedError, match=words):
            op(forward_ad.make_dual(first, first), *rest)
        assert op(first, *rest) is not None  # a plain tensor has no derivative to lose

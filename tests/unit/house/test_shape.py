"""The size profile counts what it says and fails over its caps."""

from scripts import shape

SOURCE = '''"""Doc."""


@decorated
def outer():
    def inner():
        return 1

    return inner
'''


def test_nested_functions_are_measured_and_decorators_are_not():
    module, functions = shape.measure("engine/x.py", SOURCE)
    assert module.lines == 9
    assert {(f.where, f.lines) for f in functions} == {("engine/x.py:5 outer", 5), ("engine/x.py:6 inner", 2)}


def test_kernels_have_a_wider_function_cap():
    body = "def f():\n" + "    x = 1\n" * 60
    _, [kernel] = shape.measure("kernels/reference/x.py", body)
    _, [plain] = shape.measure("engine/x.py", body)
    assert kernel.lines <= kernel.cap
    assert plain.lines > plain.cap


def test_report_names_what_is_over_its_cap(capsys):
    long = shape.Sized("engine/x.py", 401, 400)
    assert shape.report("modules", [long], {}) == ["engine/x.py: 401 lines, cap 400"]
    assert shape.report("modules", [shape.Sized("engine/x.py", 400, 400)], {"median": 400}) == []
    assert shape.report("modules", [shape.Sized("engine/x.py", 150, 400)], {"median": 100}) == [
        "modules: median of 150 lines, budget 100"
    ]


def test_p90_is_the_nearest_rank():
    assert shape.profile(range(1, 11)) == {"median": 6, "p90": 9, "max": 10}

"""Does a chat template read a message's content as a list of parts, or as one string?

Engines find out from the template's syntax tree and shape the content accordingly. The rule (vLLM's "auto"): a loop
over the content of a message, directly, through a variable called `content`, or through a macro's parameter.
"""

from __future__ import annotations

from jinja2 import nodes


def reads_parts(tree: nodes.Template) -> bool:
    """True when the template has a loop over the parts of a message's content."""
    messages = _aliases(tree, "messages")
    items = {
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in messages)
    }
    return any(_loops_over_content(loop, tree, items) for loop in tree.find_all(nodes.For))


def _loops_over_content(loop: nodes.For, tree: nodes.Template, items: set[str]) -> bool:
    if any(_reads(loop.iter, item, "content") for item in items):
        return True
    if not isinstance(loop.iter, nodes.Name):
        return False
    macro = next((macro for macro in tree.find_all(nodes.Macro) if _contains(macro, loop)), None)
    if macro is None:
        return loop.iter.name == "content"
    return loop.iter.name in _content_parameters(tree, macro, items)


def _content_parameters(tree: nodes.Template, macro: nodes.Macro, items: set[str]) -> set[str]:
    """Parameters of a macro that some call gives a message's content."""
    names = [argument.name for argument in macro.args]
    found = set()
    for call in tree.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = [*zip(names, call.args, strict=False), *((pair.key, pair.value) for pair in call.kwargs)]
        for name, value in given:
            if name in names and any(_reads(value, item, "content") for item in items):
                found.add(name)
    return found


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    """`name` and every variable that is set from it."""
    found, waiting = {name}, [name]
    while waiting:
        source = waiting.pop()
        for assignment in tree.find_all(nodes.Assign):
            target = assignment.target
            if (
                isinstance(target, nodes.Name)
                and target.name not in found
                and _reads(assignment.node, source)
            ):
                found.add(target.name)
                waiting.append(target.name)
    return found


def _reads(node: nodes.Node, name: str, key: str | None = None) -> bool:
    """Is `node` the variable (or its item `key`), perhaps behind filters, tests or a slice?"""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        if node.node is None:
            return False
        node = node.node
    if key is not None:
        if isinstance(node, nodes.Getattr):
            same = node.attr == key
        else:
            same = (
                isinstance(node, nodes.Getitem)
                and isinstance(node.arg, nodes.Const)
                and node.arg.value == key
            )
        if not same:
            return False
        node = node.node  # type: ignore[attr-defined]
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _contains(macro: nodes.Macro, loop: nodes.For) -> bool:
    return any(found is loop for found in macro.find_all(nodes.For))

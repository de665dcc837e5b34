"""An HTML page as a tree, by Python's own parser."""

from collections.abc import Iterator
from html.parser import HTMLParser

VOID = ("meta", "link", "br", "img", "input", "path", "rect", "circle")


class Node:
    """Hold an element: its tag, attributes, children (elements and text)."""

    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag, self.attributes = tag, attributes
        self.children: list[Node | str] = []

    def walk(self) -> "Iterator[Node]":
        """Yield this element and all below it."""
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def find(self, tag: str = "", **attributes: str) -> "list[Node]":
        """Return the elements of a tag whose attributes have these values, a class among the classes."""

        def fits(node: Node) -> bool:
            for name, value in attributes.items():
                held = node.attributes.get(name.rstrip("_").replace("_", "-"))
                if held is None or value not in (held, *held.split()):
                    return False
            return not tag or node.tag == tag

        return [node for node in self.walk() if fits(node)]

    @property
    def text(self) -> str:
        """Return all text within, white space made single."""
        parts = [child if isinstance(child, str) else child.text for child in self.children]
        return " ".join(" ".join(parts).split())


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.root = Node("", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(node)
        if tag not in VOID or (
            tag in ("path", "rect", "circle") and not self.get_starttag_text().endswith("/>")
        ):  # type: ignore[union-attr]
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Node(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def parse(text: str) -> Node:
    """Return the page; every element must be closed in its place."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert len(reader.open) == 1, f"<{reader.open[-1].tag}> is not closed"
    return reader.root

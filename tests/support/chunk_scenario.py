"""Text scenarios of messages in chunks: a command, `----`, and what the assembler answers.

assembler [MESSAGES [BYTES [EXPIRE_S]]]
chunk PRODUCER ID INDEX[!] [PLACE]   one byte of a message; `!`: its last chunk. PLACE: where it is stored, else a new one
wait SECONDS | silent | remove PRODUCER ID
"""

from magnetar.proto.batch_extensions import Chunk
from magnetar.proto.chunks import Assembler, LetGo
from support.text_scenarios import play


def run_scenario(text: str) -> str:
    """The text with the output parts as the core produces them."""
    assembler = Assembler[int](3, 10, 60.0)
    now, next_place = 0.0, 1

    def run(command: str) -> list[str]:
        nonlocal assembler, now, next_place
        name, *arguments = command.split()
        lines: list[str] = []
        match name:
            case "assembler":
                messages, size, expire_s = (*map(int, arguments), *(3, 10, 60)[len(arguments) :])
                assembler = Assembler(messages, size, float(expire_s))
            case "chunk":
                producer, chunk_id, index, *rest = arguments
                place = int(rest[0]) if rest else next_place
                next_place = max(next_place, place + 1)
                chunk = Chunk(chunk_id.encode(), int(index.rstrip("!")), index.endswith("!"))
                added = assembler.add(producer, chunk, place, index[:1].encode(), now)
                lines += map(_told, added.let_go)
                if added.message is not None:
                    state = "whole" if added.message.finished else "unfinished"
                    value = (
                        "too large" if added.message.too_large else b"".join(added.message.pieces).decode()
                    )
                    again = ", repeated" if added.repeated else ""
                    lines.append(f"{state} {value} at {_places(added.message.places)}{again}")
            case "wait":
                now += float(arguments[0])
            case "silent":
                lines += [f"silent: {_places(message.places)}" for message in assembler.silent(now)]
            case "remove":
                message = assembler.find(arguments[0], arguments[1].encode())
                assert message is not None
                assembler.remove(message)
        assembler.check()
        due = assembler.next_due
        end = "" if due is None else f", next due in {due - now:g} s"
        return [*lines, f"= {len(assembler.unfinished)} unfinished, {assembler.held_bytes} bytes{end}"]

    return play(text, run)


def _places(places: list[int]) -> str:
    return ",".join(map(str, places))


def _told(let_go: LetGo[int]) -> str:
    return f"{'orphan' if let_go.orphan else 'give back'} {_places(let_go.places)}: {let_go.why}"

"""Pure wire vocabulary: ids, frames, commands, entry and batch formats, errors. No I/O."""

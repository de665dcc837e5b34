"""A hub data set by name, through the parquet files that the hub makes of every public data set."""

from pathlib import Path

from plora_jax.data.files import one_line
from plora_jax.errors import UserError
from plora_jax.hub import why_unreachable


def hub_files(name: str) -> list[Path]:
    """Download the parquet files of `owner/name` or `owner/name:split` (split: train unless given).

    UserError when the hub cannot be reached, has no such data set, or the split is absent.
    """
    repository, _, split = name.partition(":")
    split = split or "train"
    try:
        if offline := why_unreachable():
            raise ConnectionError(offline)
        from huggingface_hub import HfApi, hf_hub_download

        branch = "refs/convert/parquet"
        found = HfApi().list_repo_files(repository, repo_type="dataset", revision=branch)
        listed = [f for f in found if f.endswith(".parquet")]
        splits = sorted({Path(f).parent.name for f in listed})
        configs = sorted({Path(f).parts[0] for f in listed})
        config = "default" if "default" in configs else configs[0] if configs else ""
        chosen = [f for f in listed if Path(f).parent == Path(config, split)]
        if chosen:
            return [
                Path(hf_hub_download(repository, f, repo_type="dataset", revision=branch))
                for f in sorted(chosen)
            ]
    except Exception as error:  # the hub client raises a dozen unrelated types: http, offline, gated, absent
        raise UserError(
            f"{name}: no such file here, and the hub data set of that name could not be fetched ({one_line(error)}). "
            "Check the spelling and the network, or give a local file."
        ) from None
    raise UserError(f"{name}: the hub data set has no split {split!r}; it has {', '.join(splits) or 'none'}.")

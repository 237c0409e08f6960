"""What there is to see of a hub repository without its weights: a folder of headers.

A safetensors file begins with a header that names its tensors. Only that much of each file is
read; a sparse file of the full size, which takes no room on the disk, stands for the rest.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dllm_jax.loading.hub import Repository, indexed, reaching

_LENGTH_BYTES = 8  # a file starts with the length of its header
_LONGEST = 100_000_000  # what safetensors reads at most
_CHUNK = 1 << 16
_AT_ONCE = 8


def fetch_headers(name: str, revision: str | None, to: Path) -> Path:
    """A folder to inspect a model by, and no more: `load` would take the gaps for zeros.

    Args:
        name: `org/name`.
        to: Where the folder is made, where the weights are not in the cache already.

    Raises:
        HubError: Whatever went wrong.
    """
    with reaching("model", name, revision) as repository:
        folder = repository.fetch_small()
        names = indexed(folder)
        files = [] if repository.failure else repository.weights(folder, names)
        if not any(file.will_download for file in files):
            return repository.fetch_weights(folder, names)
        made = to / name.rpartition("/")[2]  # which may tell of the model's kind
        made.mkdir()
        for path in folder.iterdir():
            (made / path.name).symlink_to(path.resolve())
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            wanted = [file for file in files if not (made / file.filename).exists()]
            headers = pool.map(lambda f: _header(repository, folder.name, f.filename), wanted)
            for file, header in zip(wanted, headers, strict=True):
                with (made / file.filename).open("wb") as out:
                    out.write(header)
                    out.truncate(file.file_size)
        return made


def _header(repository: Repository, commit: str, file: str) -> bytes:
    """The beginning of a file, its header at least; the connection is cut there."""
    from huggingface_hub import constants, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(repository.name, file, revision=commit)
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    data = b""
    with get_session().stream("GET", url, headers=headers, timeout=timeout) as answer:
        hf_raise_for_status(answer)
        for chunk in answer.iter_bytes(_CHUNK):
            data += chunk
            if len(data) >= min(_LONGEST, _LENGTH_BYTES + _length(data)):
                break
    return data


def _length(data: bytes) -> int:
    return int.from_bytes(data[:_LENGTH_BYTES], "little")

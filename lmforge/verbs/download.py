"""`lmforge download`: a model of the Hugging Face hub, into a folder or the hub's cache."""

from lmforge import hub
from lmforge.config.verbs import DownloadOptions


def run_download(options: DownloadOptions) -> int:
    """Download a model and print what was downloaded. Raises UserError."""
    name, revision = hub.parse_model_name(options.name, options.revision)
    result = hub.download(name, revision, options.folder, report=lambda line: print(line, flush=True))
    sizes = [sum(file.size for file in files) for files in (result.downloaded, result.already_present)]
    print(
        f"{result.folder}: {name} at {result.commit}; fetched {len(result.downloaded)} files, {sizes[0]:,} bytes;"
        f" {len(result.already_present)} were there, {sizes[1]:,} bytes"
    )
    return 0

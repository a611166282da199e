"""Write the statistics of a folder of images for ``FID.reference``: ``python -m lit_vgrpo.metrics FOLDER FILE.npz``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from lit_vgrpo.errors import say
from lit_vgrpo.metrics.features import INCEPTION, feature_network
from lit_vgrpo.metrics.reference import STATISTICS_SUFFIX, reference_statistics
from lit_vgrpo.system.hub import LoadError


def main(args: Sequence[str] | None = None) -> int:
    """Write the file and return 0, or 2 after a one-line error."""
    parser = argparse.ArgumentParser(prog="python -m lit_vgrpo.metrics", description=__doc__)
    parser.add_argument("folder", help="folder of images")
    parser.add_argument("file", help=f"the {STATISTICS_SUFFIX} file to write")
    parser.add_argument("--features", default=INCEPTION, help="inception, a TorchScript file or a transformers folder")
    parser.add_argument("--size", type=int, help="images are resized to SIZE x SIZE pixels")
    parser.add_argument("--kid", action="store_true", help="keep the features of every image, for KID")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(args)
    if not options.file.endswith(STATISTICS_SUFFIX):
        parser.error(f"{options.file} does not end in {STATISTICS_SUFFIX}")
    try:
        network = feature_network(options.features, options.size).to(options.device)
        reference = reference_statistics(options.folder, network, options.kid)
        reference.save(options.file)
    except (ValueError, OSError, LoadError) as error:
        say(f"Error: {error}", error=True)
        return 2
    say(f"{options.file}: {reference.count} images, {len(reference.mean)} features of {network.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

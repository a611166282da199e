"""Write the statistics of a folder of images for ``FID.reference``: ``python -m lit_vgrpo.metrics FOLDER FILE.npz``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from lit_vgrpo.metrics.features import INCEPTION, feature_network
from lit_vgrpo.metrics.reference import reference_statistics
from lit_vgrpo.system.hub import LoadError


def main(args: Sequence[str] | None = None) -> None:
    """Write the file; raise SystemExit with a one-line error."""
    parser = argparse.ArgumentParser(prog="python -m lit_vgrpo.metrics", description=__doc__)
    parser.add_argument("folder", help="folder of images")
    parser.add_argument("file", help="the .npz file to write")
    parser.add_argument("--features", default=INCEPTION, help="inception, a TorchScript file or a transformers folder")
    parser.add_argument("--kid", action="store_true", help="keep the features of every image, for KID")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(args)
    try:
        network = feature_network(options.features).to(options.device)
        reference_statistics(options.folder, network, options.kid).save(options.file)
    except (ValueError, OSError, LoadError) as error:
        sys.exit(f"Error: {error}")


if __name__ == "__main__":
    main()

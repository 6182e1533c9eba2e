"""Fonts that the tower was trained on, and fonts that it is measured on and has not seen.

Whole families are held out, with every weight of theirs. All are free; they come in Debian's packages of these names
(`fonts-` in front), but for DejaVu and STIX, which matplotlib brings. Upright faces, regular and bold.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kvpatch_jax.errors import InputError

Families = Mapping[str, tuple[str, ...]]

SEEN: Families = {
    "3270": ("3270-Regular",),
    "agave": ("agave-r-autohinted", "agave-b-autohinted"),
    "b612": ("B612Mono-Regular", "B612Mono-Bold", "B612-Regular", "B612-Bold"),
    "cabin": ("Cabin-Regular", "Cabin-Bold"),
    "cantarell": ("Cantarell-Regular", "Cantarell-Bold"),
    "clear-sans": ("ClearSans-Regular", "ClearSans-Bold"),
    "comic-neue": ("ComicNeue-Regular",),
    "courier-prime": ("Courier Prime", "Courier Prime Bold", "Courier Prime Sans", "Courier Prime Code"),
    "crosextra-caladea": ("Caladea-Regular", "Caladea-Bold"),
    "crosextra-carlito": ("Carlito-Regular", "Carlito-Bold"),
    "dosis": ("Dosis-Book",),
    "ebgaramond": ("EBGaramond12-Regular", "EBGaramond12-Bold"),
    "fantasque-sans": ("FantasqueSansMono-Regular", "FantasqueSansMono-Bold"),
    "firacode": ("FiraCode-Regular", "FiraCode-Bold"),
    "freefont-ttf": ("FreeMono", "FreeMonoBold", "FreeSans", "FreeSansBold", "FreeSerif", "FreeSerifBold"),
    "go": ("Go-Mono", "Go-Mono-Bold", "Go-Regular", "Go-Bold"),
    "inconsolata": ("Inconsolata",),
    "inter": ("Inter-Regular", "Inter-Bold"),
    "jetbrains-mono": ("JetBrainsMono-Regular", "JetBrainsMono-Bold"),
    "karla": ("Karla-Regular", "Karla-Bold"),
    "lato": ("Lato-Regular", "Lato-Bold"),
    "league-mono": ("LeagueMono-Regular", "LeagueMono-Bold", "LeagueMono-NarrowRegular"),
    "liberation2": (
        "LiberationMono-Regular",
        "LiberationMono-Bold",
        "LiberationSans-Regular",
        "LiberationSans-Bold",
        "LiberationSerif-Regular",
        "LiberationSerif-Bold",
    ),
    "linuxlibertine": ("LinLibertine_R", "LinLibertine_M", "LinBiolinum_R"),
    "monofur": ("monof55",),
    "monoid": ("Monoid-Regular", "Monoid-Bold"),
    "mononoki": ("mononoki-Regular", "mononoki-Bold"),
    "noto-mono": ("NotoSansMono-Regular", "NotoSansMono-Bold"),
    "oldstandard": ("OldStandard-Regular", "OldStandard-Bold"),
    "open-sans": ("OpenSans-Regular", "OpenSans-Bold"),
    "prociono": ("Prociono",),
    "quattrocento": ("Quattrocento-Regular",),
    "roboto-unhinted": ("Roboto-Regular", "Roboto-Bold"),
    "sil-charis": ("CharisSIL-Regular", "CharisSIL-Bold"),
    "sil-gentium-basic": ("GenBasR", "GenBasB"),
    "tlwg-typist-ttf": ("TlwgTypist", "TlwgTypist-Bold"),
    "vollkorn": ("Vollkorn-Regular", "Vollkorn-Bold"),
}
UNSEEN: Families = {
    "DejaVu": ("DejaVuSansMono", "DejaVuSansMono-Bold", "DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif"),
    "STIX": ("STIXGeneral", "STIXGeneralBol"),
    "anonymous-pro": ("Anonymous Pro", "Anonymous Pro B"),
    "arapey": ("Arapey-Regular",),
    "cardo": ("Cardo104s",),
    "hermit": ("Hermit-medium", "Hermit-bold"),
    "manrope": ("Manrope-Regular", "Manrope-Bold"),
    "ocr-b": ("OCRB",),
    "oxygen": ("OxygenMono-Regular", "Oxygen-Sans", "Oxygen-Sans-Bold"),
    "paratype": ("PTM55F", "PTM75F", "PTS55F", "PTS75F", "PTF55F"),
    "play": ("Play-Regular", "Play-Bold"),
    "sil-andika": ("Andika-Regular", "Andika-Bold"),
}


def folders(more: Sequence[str | os.PathLike[str]] = ()) -> list[Path]:
    """Returns where fonts are looked for: matplotlib's, then those given, then the system's."""
    import matplotlib

    return [Path(matplotlib.get_data_path()) / "fonts" / "ttf", *map(Path, more), Path("/usr/share/fonts")]


def find(families: Families, more: Sequence[str | os.PathLike[str]] = (), every: bool = True) -> dict[str, list[Path]]:
    """Finds the files of families.

    Args:
      more: folders that are looked through beside matplotlib's and the system's.
      every: whether all must be there; else what is missing is left out.

    Raises:
      InputError: missing files, with Debian's packages that have them.
    """
    known = _files(folders(more))
    missing = {family for family, stems in families.items() if not set(stems) <= known.keys()}
    if every and missing:
        packages = " ".join(f"fonts-{family}" for family in sorted(missing))
        raise InputError(
            f"fonts: got no files of {len(missing)} families; expected them installed (apt install {packages})"
        )

    found = {}
    for family, stems in families.items():
        if files := [known[stem] for stem in stems if stem in known]:
            found[family] = files
    return found


def _files(places: Iterable[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    # The first folder that has a face wins, so that matplotlib's own are the same on every machine.
    for place in places:
        for path in sorted(place.rglob("*.[to]tf")):
            found.setdefault(path.stem, path)
    return found

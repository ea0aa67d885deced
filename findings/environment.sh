# Sourced with pinned packages as arguments: makes the temporary folder $folder, and in it a virtual environment whose
# Python is $python. Both are removed at the end.
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=$folder/venv/bin/python
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check "$@"
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1

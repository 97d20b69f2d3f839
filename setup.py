from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup

root = Path(__file__).parent
cfg = ConfigParser(delimiters=['='])
cfg.read(root/'settings.ini')
cfg = cfg['DEFAULT']

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'].split(),
    author=cfg['author'], license=cfg['license'], packages=find_packages(include=[f"{cfg['lib_name']}*"]), python_requires=f"~={cfg['min_python']}",
    install_requires=cfg['requirements'].split(),
    extras_require={k.removeprefix('extra_'): v.split() for k,v in cfg.items() if k.startswith('extra_')},
    long_description=(root/'README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
    entry_points={'console_scripts': ['learnerdist-launch = learnerdist.launch:main']})

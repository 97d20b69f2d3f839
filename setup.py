"The package's metadata: settings.ini, and the version of learnerdist/__init__.py"
import re
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

root = Path(__file__).parent
cfg = ConfigParser(delimiters=['='])
cfg.read(root/'settings.ini', encoding='utf-8')
cfg = cfg['DEFAULT']
name = cfg['lib_name']
pythons = [f'Programming Language :: Python :: {o}' for o in ('3', *cfg['pythons'].split())]
version = re.search("__version__ = '(.+)'", (root/name/'__init__.py').read_text(encoding='utf-8'))[1]
urls = {k.removeprefix('url_').title(): v for k,v in cfg.items() if k.startswith('url_') and v}

def long_description(text, url):
    "The README for the package's page, where a relative link leads nowhere: it becomes absolute; without `url`, plain text"
    def absolute(m):
        picture,words,path = m.groups()
        if url: return f'{picture}[{words}]({url}/{"raw" if picture else "blob"}/v{version}/{path})'
        return '' if picture else words
    return re.sub(r'(!?)\[([^]]*)\]\((?!https?:)([^)]+)\)', absolute, text)

class BuildPy(build_py):
    "With the page of messages, which `learnerdist explain` prints; without nbdev's index, which only building the docs reads"
    def run(self):
        super().run()
        if not self.editable_mode: self.copy_file(str(root/'docs/messages.md'), f'{self.build_lib}/{name}/messages.md')
    def find_package_modules(self, package, package_dir):
        return [o for o in super().find_package_modules(package, package_dir) if o[1]!='_modidx']

setup(
    name=name, version=version, description=cfg['description'], keywords=cfg['keywords'].split(), author=cfg['author'],
    license_expression=cfg['license'], license_files=['LICENSE'], project_urls=urls,
    classifiers=[*cfg['classifiers'].strip().splitlines(), *pythons],
    packages=find_packages(include=[name, f'{name}.*']), package_data={'': ['py.typed','*.pyi']}, cmdclass=dict(build_py=BuildPy),
    python_requires=f">={cfg['pythons'].split()[0]}", install_requires=cfg['requirements'].split(),
    extras_require={k.removeprefix('extra_'): v.split() for k,v in cfg.items() if k.startswith('extra_')},
    long_description=long_description((root/'README.md').read_text(encoding='utf-8'), urls.get('Source')),
    long_description_content_type='text/markdown',
    entry_points={'console_scripts': ['learnerdist = learnerdist.command:main']})

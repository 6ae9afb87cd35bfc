"""Contracts of import-linter's that are this kit's own; pyproject.toml says for what."""

from graphlib import CycleError, TopologicalSorter

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


class _ImportsContract(Contract):
    """Contract that single imports can break, each by itself."""

    def is_broken_by(self, importer: str, imported: str) -> bool:
        raise NotImplementedError

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        packages = tuple(self.session_options["root_packages"])
        modules = sorted(module for module in graph.modules if module.partition(".")[0] in packages)
        pairs = [
            (importer, imported)
            for importer in modules
            for imported in sorted(graph.find_modules_directly_imported_by(importer))
        ]
        inside = [pair for pair in pairs if pair[1].partition(".")[0] in packages]
        broken = [
            f"{importer}:{detail['line_number']} imports {imported}"
            for importer, imported in inside
            if self.is_broken_by(importer, imported)
            for detail in graph.get_import_details(importer=importer, imported=imported)
        ]
        return ContractCheck(kept=not broken, metadata={"broken": broken})

    def render_broken_contract(self, check: ContractCheck) -> None:
        for line in check.metadata["broken"]:
            output.print_error(line, bold=False)


class PublicContract(_ImportsContract):
    """Contract by which a package imports only the modules in `public` of another package."""

    public = fields.SetField(subfield=fields.StringField())

    def is_broken_by(self, importer: str, imported: str) -> bool:
        return (
            importer.partition(".")[0] != imported.partition(".")[0] and imported not in self.public
        )


class OwnFaceContract(_ImportsContract):
    """Contract by which no module of a package imports the package itself.

    The package's names come from its modules.
    """

    def is_broken_by(self, importer: str, imported: str) -> bool:
        return importer != imported and importer.partition(".")[0] == imported


class NoCircleContract(Contract):
    """Contract by which imports form no circle, not even imports inside functions."""

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        circle: list[str] = []
        try:
            TopologicalSorter(
                {
                    module: graph.find_modules_directly_imported_by(module)
                    for module in graph.modules
                }
            ).prepare()
        except CycleError as error:
            circle = error.args[1]
        return ContractCheck(kept=not circle, metadata={"circle": circle})

    def render_broken_contract(self, check: ContractCheck) -> None:
        output.print_error(
            "a circle, each imported by the next: " + " -> ".join(check.metadata["circle"]),
            bold=False,
        )

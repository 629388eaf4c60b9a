"""`octavo explain infsvc`: calls the operator's package, which reads the cluster and explains conditions."""

import argparse
import sys

from octavo_server.cli.plugins import operator_plugin


def explain_infsvc(args: argparse.Namespace) -> int:
    if args.name is not None and args.all_namespaces:
        print("octavo: NAME and -A can't be combined: leave -A out, and give the namespace with -n.", file=sys.stderr)
        return 2
    explain = operator_plugin("explain", command="octavo explain infsvc")
    code: int = explain(
        args.name,
        namespace=args.namespace,
        all_namespaces=args.all_namespaces,
        kubeconfig=args.kubeconfig,
        context=args.context,
        as_json=args.output == "json",
    )
    return code

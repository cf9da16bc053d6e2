// One binary for etcd, the Kubernetes components, kubectl and three small tools of the embedded cluster.
//
//	k8s COMPONENT [flags]      or a link to it that is named like the component
//
// One binary instead of eight: they share nearly all of their code, so this is a fifth of the disk and of the link time.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
	_ "time/tzdata"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	kcm "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

// run turns a cobra command into a component: it parses os.Args itself.
func run(newCommand func() *cobra.Command) func() int {
	return func() int { return cli.Run(newCommand()) }
}

var components = map[string]func() int{
	"etcd":                    func() int { etcdmain.Main(os.Args); return 0 },
	"kube-apiserver":          run(apiserver.NewAPIServerCommand),
	"kube-controller-manager": run(kcm.NewControllerManagerCommand),
	"kube-scheduler":          run(func() *cobra.Command { return scheduler.NewSchedulerCommand() }),
	"kubelet":                 run(func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) }),
	"kube-proxy":              run(proxy.NewProxyCommand),
	"kubectl":                 runKubectl,
	"volume-provisioner":      func() int { return volumeProvisioner(os.Args[1:]) },
	"cri-clean":               func() int { return criClean(os.Args[1:]) },
	"cri-image":               func() int { return criImage(os.Args[1:]) },
}

func runKubectl() int {
	if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
		kubectlutil.CheckErr(err) // prints and exits, as kubectl's own main does
	}
	return 0
}

func main() {
	if filepath.Base(os.Args[0]) == "k8s" {
		os.Args = os.Args[1:]
	}
	if len(os.Args) > 0 {
		if component, ok := components[filepath.Base(os.Args[0])]; ok {
			os.Exit(component())
		}
	}
	names := make([]string, 0, len(components))
	for name := range components {
		names = append(names, name)
	}
	sort.Strings(names)
	fmt.Fprintln(os.Stderr, "usage: k8s "+strings.Join(names, "|")+" [flags]")
	os.Exit(2)
}

package main

import (
	"context"
	"fmt"
	"os"
	"time"

	internalapi "k8s.io/cri-api/pkg/apis"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	remote "k8s.io/cri-client/pkg"
)

const criTimeout = 20 * time.Second

// criClean stops and removes every pod sandbox of one runtime: k8s cri-clean ENDPOINT. The runtime then undoes the pods'
// networks and mounts by itself, which nothing else knows how to do as well.
func criClean(args []string) int {
	if len(args) != 1 {
		fmt.Fprintln(os.Stderr, "usage: k8s cri-clean ENDPOINT")
		return 2
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*criTimeout)
	defer cancel()
	service, err := remote.NewRemoteRuntimeService(args[0], criTimeout, nil, nil)
	if err != nil {
		fmt.Fprintln(os.Stderr, "cri-clean:", err)
		return 1
	}
	removed, failed, err := removeSandboxes(ctx, service)
	if err != nil {
		fmt.Fprintln(os.Stderr, "cri-clean:", err)
		return 1
	}
	fmt.Printf("cri-clean: removed %d pod sandboxes, %d failed\n", removed, failed)
	return min(failed, 1)
}

func removeSandboxes(ctx context.Context, service internalapi.RuntimeService) (removed, failed int, err error) {
	containers, err := service.ListContainers(ctx, &runtimeapi.ContainerFilter{})
	if err != nil {
		return 0, 0, err
	}
	for _, c := range containers {
		if err := service.StopContainer(ctx, c.Id, 0); err != nil {
			fmt.Fprintln(os.Stderr, "cri-clean: stop container:", err)
		}
	}
	pods, err := service.ListPodSandbox(ctx, &runtimeapi.PodSandboxFilter{})
	if err != nil {
		return 0, 0, err
	}
	for _, p := range pods {
		if err := service.StopPodSandbox(ctx, p.Id); err != nil {
			fmt.Fprintln(os.Stderr, "cri-clean: stop pod:", err)
		}
		if err := service.RemovePodSandbox(ctx, p.Id); err != nil {
			fmt.Fprintln(os.Stderr, "cri-clean: remove pod:", err)
			failed++
			continue
		}
		removed++
	}
	return removed, failed, nil
}

// criImage prints the digest of an image's configuration, or nothing when the runtime lacks the image:
// k8s cri-image ENDPOINT NAME. Two archives of the same image have the same one, so it tells whether an import is needed.
func criImage(args []string) int {
	if len(args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: k8s cri-image ENDPOINT NAME")
		return 2
	}
	ctx, cancel := context.WithTimeout(context.Background(), criTimeout)
	defer cancel()
	service, err := remote.NewRemoteImageService(args[0], criTimeout, nil, nil)
	if err != nil {
		fmt.Fprintln(os.Stderr, "cri-image:", err)
		return 1
	}
	status, err := service.ImageStatus(ctx, &runtimeapi.ImageSpec{Image: args[1]}, false)
	if err != nil {
		fmt.Fprintln(os.Stderr, "cri-image:", err)
		return 1
	}
	if status.GetImage() != nil {
		fmt.Println(status.GetImage().GetId())
	}
	return 0
}

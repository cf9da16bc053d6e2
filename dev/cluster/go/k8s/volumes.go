package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
)

const (
	provisionerName         = "rljob.dev/directory"
	claimProvisioner        = "volume.kubernetes.io/storage-provisioner" // set on the claim by Kubernetes
	volumeProvisionedBy     = "pv.kubernetes.io/provisioned-by"
	volumeMode              = 0o777 // a volume is for any user, as on a cluster's real storage with fsGroup
	maxRetries              = 10
	clientQPS               = 50 // the library's default of 5 makes twenty claims wait for seconds
	kubernetesHostnameLabel = "kubernetes.io/hostname"
)

// provisioner makes one directory for each claim, and removes it when the claim is gone.
//
// Kubernetes' own host path provisioner would do nearly the same, but its directories belong to root with mode 0750 under
// a fixed place in /tmp, so that pods of other users cannot write to them.
type provisioner struct {
	client    kubernetes.Interface
	claims    corelisters.PersistentVolumeClaimLister
	volumes   corelisters.PersistentVolumeLister
	queue     workqueue.TypedRateLimitingInterface[string]
	directory string
	node      string
}

// volumeProvisioner is the component: k8s volume-provisioner --kubeconfig F --directory D --node N.
func volumeProvisioner(args []string) int {
	flags := flag.NewFlagSet("volume-provisioner", flag.ContinueOnError)
	kubeconfig := flags.String("kubeconfig", "", "kubeconfig file")
	directory := flags.String("directory", "", "where the volumes' directories are made")
	node := flags.String("node", "", "name of the node that has them")
	if err := flags.Parse(args); err != nil {
		return 2
	}
	if *kubeconfig == "" || *directory == "" || *node == "" {
		flags.Usage()
		return 2
	}
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		fmt.Fprintln(os.Stderr, "volume-provisioner:", err)
		return 1
	}
	config.QPS, config.Burst = clientQPS, 2*clientQPS
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		fmt.Fprintln(os.Stderr, "volume-provisioner:", err)
		return 1
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	factory := informers.NewSharedInformerFactory(client, 10*time.Minute)
	p := &provisioner{
		client:    client,
		claims:    factory.Core().V1().PersistentVolumeClaims().Lister(),
		volumes:   factory.Core().V1().PersistentVolumes().Lister(),
		queue:     workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[string]()),
		directory: *directory,
		node:      *node,
	}
	p.watch("claim/", factory.Core().V1().PersistentVolumeClaims().Informer())
	p.watch("volume/", factory.Core().V1().PersistentVolumes().Informer())
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	klog.InfoS("volume provisioner started", "directory", p.directory)
	go func() { <-ctx.Done(); p.queue.ShutDown() }()
	for p.next(ctx) {
	}
	return 0
}

func (p *provisioner) watch(prefix string, informer cache.SharedIndexInformer) {
	add := func(object any) {
		if key, err := cache.DeletionHandlingMetaNamespaceKeyFunc(object); err == nil {
			p.queue.Add(prefix + key)
		}
	}
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: add, UpdateFunc: func(_, object any) { add(object) },
	})
	if err != nil {
		panic(err) // only when the informer was stopped before it started
	}
}

func (p *provisioner) next(ctx context.Context) bool {
	key, shutdown := p.queue.Get()
	if shutdown {
		return false
	}
	defer p.queue.Done(key)
	err := p.sync(ctx, key)
	switch {
	case err == nil:
		p.queue.Forget(key)
	case p.queue.NumRequeues(key) < maxRetries:
		klog.ErrorS(err, "will retry", "key", key)
		p.queue.AddRateLimited(key)
	default:
		klog.ErrorS(err, "given up until the object changes", "key", key)
		p.queue.Forget(key)
	}
	return true
}

func (p *provisioner) sync(ctx context.Context, key string) error {
	if name, ok := strings.CutPrefix(key, "volume/"); ok {
		volume, err := p.volumes.Get(name)
		if err != nil {
			return ignoreNotFound(err)
		}
		return p.remove(ctx, volume)
	}
	name, _ := strings.CutPrefix(key, "claim/")
	namespace, name, err := cache.SplitMetaNamespaceKey(name)
	if err != nil {
		return err
	}
	claim, err := p.claims.PersistentVolumeClaims(namespace).Get(name)
	if err != nil {
		return ignoreNotFound(err)
	}
	return p.provision(ctx, claim)
}

func ignoreNotFound(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// provision makes the directory first, then the volume: a pod can use the volume as soon as it exists.
func (p *provisioner) provision(ctx context.Context, claim *v1.PersistentVolumeClaim) error {
	ours := claim.Annotations[claimProvisioner] == provisionerName && claim.Spec.StorageClassName != nil
	if !ours || claim.Spec.VolumeName != "" || claim.DeletionTimestamp != nil {
		return nil
	}
	if problem := unsupported(claim); problem != "" {
		return p.refuse(ctx, claim, problem)
	}
	class, err := p.client.StorageV1().StorageClasses().Get(ctx, *claim.Spec.StorageClassName, metav1.GetOptions{})
	if err != nil {
		return err
	}
	volume := p.volumeFor(claim, class)
	path := volume.Spec.Local.Path
	if err := os.MkdirAll(path, volumeMode); err != nil {
		return err
	}
	if err := os.Chmod(path, volumeMode); err != nil { // the umask took bits from MkdirAll's
		return err
	}
	_, err = p.client.CoreV1().PersistentVolumes().Create(ctx, volume, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	klog.InfoS("volume made", "claim", klog.KObj(claim), "path", path)
	return nil
}

func unsupported(claim *v1.PersistentVolumeClaim) string {
	switch {
	case claim.Spec.VolumeMode != nil && *claim.Spec.VolumeMode != v1.PersistentVolumeFilesystem:
		return "volumeMode Block is not supported here; use Filesystem"
	case claim.Spec.Selector != nil:
		return "spec.selector cannot be used with a dynamic volume; remove it"
	case claim.Spec.DataSource != nil || claim.Spec.DataSourceRef != nil:
		return "spec.dataSource is not supported here; remove it"
	}
	return ""
}

// refuse tells the claim's owner why it stays Pending.
func (p *provisioner) refuse(ctx context.Context, claim *v1.PersistentVolumeClaim, problem string) error {
	now := metav1.Now()
	event := &v1.Event{
		// named after the claim, so that a second pass does not tell it twice
		ObjectMeta: metav1.ObjectMeta{Name: claim.Name + ".provisioning-failed." + string(claim.UID), Namespace: claim.Namespace},
		InvolvedObject: v1.ObjectReference{
			APIVersion: "v1", Kind: "PersistentVolumeClaim", Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
		},
		Type: v1.EventTypeWarning, Reason: "ProvisioningFailed", Message: problem, Count: 1,
		FirstTimestamp: now, LastTimestamp: now, Source: v1.EventSource{Component: provisionerName},
	}
	_, err := p.client.CoreV1().Events(claim.Namespace).Create(ctx, event, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

func (p *provisioner) volumeFor(claim *v1.PersistentVolumeClaim, class *storagev1.StorageClass) *v1.PersistentVolume {
	name := "pvc-" + string(claim.UID)
	policy := v1.PersistentVolumeReclaimDelete
	if class.ReclaimPolicy != nil {
		policy = *class.ReclaimPolicy
	}
	return &v1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: name, Annotations: map[string]string{volumeProvisionedBy: provisionerName}},
		Spec: v1.PersistentVolumeSpec{
			Capacity:                      v1.ResourceList{v1.ResourceStorage: claim.Spec.Resources.Requests[v1.ResourceStorage]},
			AccessModes:                   claim.Spec.AccessModes,
			PersistentVolumeReclaimPolicy: policy,
			StorageClassName:              class.Name,
			ClaimRef: &v1.ObjectReference{
				APIVersion: "v1", Kind: "PersistentVolumeClaim", Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
			},
			PersistentVolumeSource: v1.PersistentVolumeSource{
				// Local, not HostPath: the kubelet then honours fsGroup
				Local: &v1.LocalVolumeSource{Path: filepath.Join(p.directory, name)},
			},
			NodeAffinity: &v1.VolumeNodeAffinity{Required: &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
				MatchExpressions: []v1.NodeSelectorRequirement{{
					Key: kubernetesHostnameLabel, Operator: v1.NodeSelectorOpIn, Values: []string{p.node},
				}},
			}}}},
		},
	}
}

// remove deletes a volume whose claim is gone: first the data, then the object, so that a failure is tried again.
func (p *provisioner) remove(ctx context.Context, volume *v1.PersistentVolume) error {
	ours := volume.Annotations[volumeProvisionedBy] == provisionerName && volume.Spec.Local != nil
	if !ours || volume.Status.Phase != v1.VolumeReleased || volume.DeletionTimestamp != nil ||
		volume.Spec.PersistentVolumeReclaimPolicy != v1.PersistentVolumeReclaimDelete {
		return nil
	}
	path := volume.Spec.Local.Path
	if filepath.Dir(path) != filepath.Clean(p.directory) {
		return fmt.Errorf("volume %s has the path %s, which is not in %s; not removed", volume.Name, path, p.directory)
	}
	if err := os.RemoveAll(path); err != nil {
		return err
	}
	err := p.client.CoreV1().PersistentVolumes().Delete(ctx, volume.Name, metav1.DeleteOptions{})
	klog.InfoS("volume removed", "volume", volume.Name, "path", path)
	return ignoreNotFound(err)
}
